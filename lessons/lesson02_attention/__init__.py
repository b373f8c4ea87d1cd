"""Lesson 02: attention."""
