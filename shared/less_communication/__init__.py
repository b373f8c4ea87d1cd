"""Less communication: smaller messages, rarer messages, and messages that mind the slow link."""
