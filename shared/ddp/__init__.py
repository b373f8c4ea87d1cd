"""Data parallel training: five engines that average gradients, and the wrapper they share."""
