"""Instruments: bytes sent, bandwidth, traces, seconds, memory, and links made slow."""
