"""Lesson 17: long context."""
