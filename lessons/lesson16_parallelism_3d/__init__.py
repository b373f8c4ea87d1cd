"""Lesson 16: parallelism in three dimensions."""
