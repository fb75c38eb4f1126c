"""What a response is worth: verifiers (one file each) and the one place that calls a user's own."""
