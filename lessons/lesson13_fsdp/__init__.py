"""Lesson 13: FSDP."""
