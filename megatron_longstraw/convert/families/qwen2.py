"""Qwen2 and Qwen2.5: Llama's tensors with a bias in the query, key and value projections."""
from __future__ import annotations

from megatron_longstraw.config import ModelConfig
from megatron_longstraw.convert.families import llama
from megatron_longstraw.convert.hf_config import HFConfig, decoder_settings
from megatron_longstraw.convert.tensors import QueryKeyValue, Rule

MODEL_TYPES = ("qwen2",)

QKV_BIAS = QueryKeyValue(
    "decoder.layers.{layer}.self_attention.linear_qkv.bias",
    tuple(f"model.layers.{{layer}}.self_attn.{part}_proj.bias" for part in "qkv"),
)


def settings(hf: HFConfig) -> dict:
    return decoder_settings(hf) | {"add_qkv_bias": True}


def tensors(model: ModelConfig) -> tuple[Rule, ...]:
    return llama.tensors(model) + (QKV_BIAS,)


def sliding_window(hf: HFConfig) -> int | None:
    return hf.sliding_window(on=hf.flag("use_sliding_window"))
