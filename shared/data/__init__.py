"""Corpora, tokenizer and batching."""
