"""Exact-gradient RL post-training on shared long prompts, on Megatron-Core's own schedules."""
__version__ = "0.1.0"
