"""The answers, one module a lesson: the instructor's room."""
