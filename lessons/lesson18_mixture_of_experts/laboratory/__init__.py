"""What the checks observe an answer in."""
