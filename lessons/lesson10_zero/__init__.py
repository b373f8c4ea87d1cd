"""Lesson 10: ZeRO."""
