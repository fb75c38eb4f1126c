"""One module per family, with

    MODEL_TYPES           the model_type values of config.json that it answers for
    settings(hf)          config.json as fields of ModelConfig; doubts go to hf.problems
    tensors(model)        the rules (convert/tensors.py) for all parameters of a resolved ModelConfig
    sliding_window(hf)    tokens that a windowed layer sees, or None without such layers

A new family is a module like these and its name in the list below.
"""
from __future__ import annotations

from types import ModuleType

from megatron_longstraw.convert.families import llama, mistral, qwen2, qwen3, qwen3_moe

FAMILIES: dict[str, ModuleType] = {
    model_type: family for family in (llama, mistral, qwen2, qwen3, qwen3_moe) for model_type in family.MODEL_TYPES
}
"""model_type -> family."""
