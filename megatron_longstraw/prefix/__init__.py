"""The prefix state: what is kept of a prompt, and attention that reads it."""
