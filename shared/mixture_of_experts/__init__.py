"""Mixture of experts by hand: who computes a token, how it gets there, whose gradient is whose."""
