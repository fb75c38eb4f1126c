"""Llama 2 and 3.x, and models of their layout (SmolLM2 among them)."""
from __future__ import annotations

from megatron_longstraw.config import ModelConfig
from megatron_longstraw.convert.hf_config import HFConfig, decoder_settings
from megatron_longstraw.convert.tensors import QueryKeyValue, Rule, Stacked, Whole

MODEL_TYPES = ("llama",)

ENDS = (
    Whole("embedding.word_embeddings.weight", "model.embed_tokens.weight", "vocab", "hidden"),
    Whole("decoder.final_layernorm.weight", "model.norm.weight", "hidden"),
)
HEAD = Whole("output_layer.weight", "lm_head.weight", "vocab", "hidden")

_LAYER, _HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."
NORMS = (
    Whole(_LAYER + "input_layernorm.weight", _HF_LAYER + "input_layernorm.weight", "hidden"),
    Whole(_LAYER + "pre_mlp_layernorm.weight", _HF_LAYER + "post_attention_layernorm.weight", "hidden"),
)
ATTENTION = (
    QueryKeyValue(
        _LAYER + "self_attention.linear_qkv.weight",
        tuple(_HF_LAYER + f"self_attn.{part}_proj.weight" for part in "qkv"),
        "hidden",
    ),
    Whole(_LAYER + "self_attention.linear_proj.weight", _HF_LAYER + "self_attn.o_proj.weight", "hidden", "heads"),
)
MLP = (
    Stacked(
        _LAYER + "mlp.linear_fc1.weight",
        (_HF_LAYER + "mlp.gate_proj.weight", _HF_LAYER + "mlp.up_proj.weight"),
        "ffn",
        "hidden",
    ),
    Whole(_LAYER + "mlp.linear_fc2.weight", _HF_LAYER + "mlp.down_proj.weight", "hidden", "ffn"),
)


def settings(hf: HFConfig) -> dict:
    hf.accept("attention_bias", (False,), "the output projection has no bias here")
    hf.accept("mlp_bias", (False,), "the MLP has no bias here")
    return decoder_settings(hf)


def tensors(model: ModelConfig) -> tuple[Rule, ...]:
    return outside(model) + NORMS + ATTENTION + MLP


def outside(model: ModelConfig) -> tuple[Rule, ...]:
    """What is not in a layer."""
    return ENDS + ((HEAD,) if model.untie_embeddings_and_output_weights else ())


def sliding_window(hf: HFConfig) -> int | None:
    return hf.sliding_window(on=False)
