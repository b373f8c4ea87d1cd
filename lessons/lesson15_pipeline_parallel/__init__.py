"""Lesson 15: pipeline parallelism."""
