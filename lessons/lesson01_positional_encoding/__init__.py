"""Lesson 01: Positional encoding."""
