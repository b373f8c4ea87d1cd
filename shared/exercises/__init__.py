"""The exercise machine: exercise cells, checks, answers, known mistakes."""
