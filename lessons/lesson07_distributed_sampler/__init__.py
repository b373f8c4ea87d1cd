"""Lesson 07: Sharing out the data."""
