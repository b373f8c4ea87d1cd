"""Lesson 05: collectives."""
