"""One training run for every mode: a file, a model, an engine, a checkpoint that all can read."""
