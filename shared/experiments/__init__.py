"""Experiments that a lesson's notebook and its script both run."""
