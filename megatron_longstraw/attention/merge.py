"""Merging partial attentions by log-sum-exp (the (out, lse) algebra of FlashDecoding and ring attention).

One convention everywhere: out [S, B, N, D], lse [S, B, N], natural logarithm, both float32 (float64 when the
inputs are). A row that has seen no key yet has lse -inf and out 0.
"""
from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64 inputs: the dtype of merges and gradient sums."""
    return torch.promote_types(dtype, torch.float32)


class AttentionAccumulator:
    """Running merge of partial attentions over disjoint key blocks."""

    def __init__(self, like_SBND: Tensor):
        dtype = accumulation_dtype(like_SBND.dtype)
        self.out_SBND = torch.zeros(like_SBND.shape, dtype=dtype, device=like_SBND.device)
        self.lse_SBN = torch.full(like_SBND.shape[:3], float("-inf"), dtype=dtype, device=like_SBND.device)

    def add(self, rows: slice, out_SBND: Tensor, lse_SBN: Tensor) -> None:
        """Merge a partial result of these rows. Its lse must be finite (never an empty row)."""
        out, lse = self.out_SBND[rows], self.lse_SBN[rows]
        # Shares from the difference of the two lse: exp(lse - merged) would carry the rounding of a large lse.
        share = torch.sigmoid(lse_SBN - lse)
        out.mul_(torch.sigmoid(lse - lse_SBN).unsqueeze(-1))
        out.addcmul_(out_SBND.to(out.dtype), share.unsqueeze(-1))
        lse.copy_(torch.logaddexp(lse, lse_SBN))
