"""Attention over long contexts: by tiles, over a ring of ranks, with heads for sequence."""
