"""Mistral: Llama's tensors, with an attention window in the first release."""
from __future__ import annotations

from megatron_longstraw.convert.families.llama import tensors
from megatron_longstraw.convert.hf_config import HFConfig, decoder_settings

__all__ = ["MODEL_TYPES", "settings", "sliding_window", "tensors"]

MODEL_TYPES = ("mistral",)


def settings(hf: HFConfig) -> dict:
    hf.number("num_key_value_heads")  # transformers' default of 8 is no safe guess
    return decoder_settings(hf)


def sliding_window(hf: HFConfig) -> int | None:
    # transformers takes an absent key for 4096 and null for no window.
    if "sliding_window" not in hf.values:
        hf.problems.append("config.json: has no sliding_window; null means full attention")
    return hf.sliding_window(on=True)
