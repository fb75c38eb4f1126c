"""Rotary embeddings at an offset: contiguous slices need nothing but the first position.

Wraps the stock RoPE and YaRN modules. `GPTModel._preprocess` (models/gpt/gpt_model.py:361-375) first asks for
`get_rotary_seq_len(..., packed_seq_params)` and right after it calls the module, so the offset of the first
call serves the second; nothing runs in between. Phases are float32 products of exact float32 positions (exact to
2**24), as in Megatron and Hugging Face; stock code casts cos and sin to the activation dtype.
"""
from __future__ import annotations

import math

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_longstraw.config import ModelConfig
from megatron_longstraw.mcore.packed import BranchParams


class OffsetRotary(torch.nn.Module):
    """Answers for the positions that the micro-batch's `BranchParams` name."""

    def __init__(self, inner: RotaryEmbedding):
        super().__init__()
        self.inner = inner
        self._offset = 0

    def get_rotary_seq_len(self, inference_context, transformer, transformer_input, config, packed_seq_params=None):
        assert isinstance(packed_seq_params, BranchParams), "the model takes its positions from BranchParams only"
        self._offset = packed_seq_params.rotary_offset
        return packed_seq_params.rotary_rows

    def forward(self, num_rows: int, packed_seq: bool = False, cp_group=None):
        return self.inner.get_emb(num_rows, self._offset)


def llama3_inv_freq(inv_freq: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """Llama-3 scaling with all four of its parameters (stock rotary_pos_embedding.py:84-94 takes the factor only).

    Wavelengths below original/high_freq_factor stay, those above original/low_freq_factor are divided by the
    factor, and those between are interpolated.
    """
    original = model.rope_scaling_original_max_position_embeddings
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / model.rope_scaling_factor + smooth * inv_freq
