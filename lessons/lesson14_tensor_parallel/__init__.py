"""Lesson 14: tensor parallelism."""
