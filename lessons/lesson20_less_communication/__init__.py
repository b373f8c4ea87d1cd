"""Lesson 20: less communication."""
