"""Fully sharded data parallelism by hand: flat units, prefetch, a mesh of two axes, checkpoints."""
