"""Low-rank adapters by hand: frozen layers with a small update, in 16 bits or in NF4."""
