"""Right answers in another style than the reference: every check has to let them pass."""
