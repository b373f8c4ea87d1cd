"""What lets a killed run resume: its state, its checkpoints, and kills to try it with."""
