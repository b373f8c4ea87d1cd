"""Lesson 09: mixed precision."""
