"""Data, tensor and pipeline parallelism together: a mesh of three axes, and an engine on it."""
