"""Lesson 06: data parallelism."""
