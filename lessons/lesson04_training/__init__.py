"""Lesson 04: Training a translator."""
