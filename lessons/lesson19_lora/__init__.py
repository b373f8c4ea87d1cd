"""Lesson 19: fine-tuning with low rank, and with weights in four bits."""
