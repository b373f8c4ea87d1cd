"""The planner: bytes and seconds of a training step on many GPUs, by arithmetic alone, no torch."""
