"""Lesson 23: one script for every mode."""
