"""What runs where an answer runs: copied beside the course, it imports nothing of the grader."""
