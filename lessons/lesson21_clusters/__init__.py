"""Lesson 21: clusters."""
