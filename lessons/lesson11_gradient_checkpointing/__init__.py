"""Lesson 11: gradient checkpointing."""
