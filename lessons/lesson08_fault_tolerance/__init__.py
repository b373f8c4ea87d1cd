"""Lesson 08: fault tolerance."""
