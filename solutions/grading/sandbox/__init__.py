"""Runs answers: `bubblewrap` is the wall, `inside/` runs within it, `run` reads what comes out."""
