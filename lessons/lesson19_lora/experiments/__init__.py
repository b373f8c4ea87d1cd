"""What this lesson's notebook and its script both run."""
