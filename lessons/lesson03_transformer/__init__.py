"""Lesson 03: the Transformer."""
