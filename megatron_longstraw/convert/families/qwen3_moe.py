"""Qwen3-MoE: Qwen3's attention, and experts in every layer."""
from __future__ import annotations

from megatron_longstraw.config import ModelConfig
from megatron_longstraw.convert.families import llama, qwen3
from megatron_longstraw.convert.families.qwen2 import sliding_window
from megatron_longstraw.convert.hf_config import HFConfig
from megatron_longstraw.convert.tensors import Rule, Stacked, Whole

__all__ = ["MODEL_TYPES", "settings", "sliding_window", "tensors"]

MODEL_TYPES = ("qwen3_moe",)

_EXPERT = "decoder.layers.{layer}.mlp.experts.local_experts.{expert}."
_HF_EXPERT = "model.layers.{layer}.mlp.experts.{expert}."
EXPERTS = (
    Whole("decoder.layers.{layer}.mlp.router.weight", "model.layers.{layer}.mlp.gate.weight", "experts", "hidden"),
    Stacked(
        _EXPERT + "linear_fc1.weight",
        (_HF_EXPERT + "gate_proj.weight", _HF_EXPERT + "up_proj.weight"),
        "moe_ffn",
        "hidden",
    ),
    Whole(_EXPERT + "linear_fc2.weight", _HF_EXPERT + "down_proj.weight", "hidden", "moe_ffn"),
)


def settings(hf: HFConfig) -> dict:
    why = "every layer has experts here"
    hf.accept("decoder_sparse_step", (1,), why)
    hf.accept("mlp_only_layers", ([],), why)
    return qwen3.settings(hf) | {
        "num_experts": hf.number("num_local_experts", "num_experts"),
        "moe_router_topk": hf.number("num_experts_per_tok"),
        "moe_ffn_hidden_size": hf.number("moe_intermediate_size"),
        # Normalised weights of the chosen experts are a softmax over the chosen.
        "moe_router_pre_softmax": not hf.flag("norm_topk_prob"),
    }


def tensors(model: ModelConfig) -> tuple[Rule, ...]:
    return llama.outside(model) + llama.NORMS + llama.ATTENTION + qwen3.HEAD_NORMS + EXPERTS
