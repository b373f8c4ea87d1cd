"""What earlier lessons built and later lessons import."""
