"""What checks.py observes answers in."""
