"""Data parallel training: six engines that average gradients, and the wrapper they share."""
