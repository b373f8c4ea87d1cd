"""Lesson 12: profiler traces."""
