"""The student edition: its files, what its pages say instead, and the proof that it holds."""
