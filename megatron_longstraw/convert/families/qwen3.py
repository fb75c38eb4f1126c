"""Qwen3: Llama's tensors with a norm over each head's queries and keys, and a head size of its own."""
from __future__ import annotations

from megatron_longstraw.config import ModelConfig
from megatron_longstraw.convert.families import llama
from megatron_longstraw.convert.families.qwen2 import sliding_window
from megatron_longstraw.convert.hf_config import HFConfig, decoder_settings
from megatron_longstraw.convert.tensors import Rule, Whole

__all__ = ["HEAD_NORMS", "MODEL_TYPES", "settings", "sliding_window", "tensors"]

MODEL_TYPES = ("qwen3",)

HEAD_NORMS = tuple(
    Whole(
        f"decoder.layers.{{layer}}.self_attention.{part}_layernorm.weight",
        f"model.layers.{{layer}}.self_attn.{part}_norm.weight",
        "head",
    )
    for part in "qk"
)


def settings(hf: HFConfig) -> dict:
    hf.accept("attention_bias", (False,), "the output projection has no bias here")
    return decoder_settings(hf) | {"qk_layernorm": True, "kv_channels": hf.number("head_dim")}


def tensors(model: ModelConfig) -> tuple[Rule, ...]:
    return llama.tensors(model) + HEAD_NORMS
