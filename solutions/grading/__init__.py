"""What `python -m solutions.grade` is made of; nothing here imports torch (the sandbox does)."""
