"""What the checks of this lesson observe an answer in."""
