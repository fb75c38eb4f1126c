"""Exact-gradient RL post-training on shared long prompts, on Megatron-Core's own schedules."""
from importlib import import_module

__version__ = "0.1.0"

_EXPORTS = {
    "BranchReplay": "megatron_longstraw.api",
    "load_config": "megatron_longstraw.config",
    "Branch": "megatron_longstraw.types",
    "PromptGroup": "megatron_longstraw.types",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str):
    """Exports are loaded on first use: the configuration and the planner must not import torch."""
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
