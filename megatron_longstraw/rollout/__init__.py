"""Where responses come from: sampling and generation on the prefix state, and rollout files."""
