"""Results out: the tables, a page per student, the picture of the class, the terminal's summary."""
