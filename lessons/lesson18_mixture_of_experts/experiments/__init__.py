"""What the lesson compares, counts and draws."""
