"""The reference run for other people's loops: a model with its loss, rows, what is counted."""
