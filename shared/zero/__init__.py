"""ZeRO by hand: optimizer states, gradients and parameters in parts, one part on each rank."""
