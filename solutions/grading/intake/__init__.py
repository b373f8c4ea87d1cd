"""Files in: who handed in what, which cells answer an exercise, and the course's own lessons."""
