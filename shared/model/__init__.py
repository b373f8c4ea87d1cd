"""The Transformer: embeddings, attention, layers and whole models."""
