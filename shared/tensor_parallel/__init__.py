"""Tensor parallelism by hand: matrices cut over ranks, and the messages between the parts."""
