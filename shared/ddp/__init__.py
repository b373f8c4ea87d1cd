"""Gradients averaged in one message, a module around a module, names of lesson 06's engines."""
