"""English-German sentence pairs from a grammar of our own."""
