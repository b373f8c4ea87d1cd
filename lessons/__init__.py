"""The lessons: each folder holds one lesson whole, and imports no other lesson."""
