"""Training a translator: loss, schedules, loop, decoding, scores, and the reference run."""
