"""Lesson 21: what belongs to it alone."""
