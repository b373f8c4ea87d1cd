"""Lesson 18: mixture of experts."""
