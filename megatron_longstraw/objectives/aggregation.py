"""How token losses become one number: the factor of every token, with denominators counted once, globally.

    loss = sum_{i,t} c[i,t] * token_loss[i,t]

    token-mean            c = mask[i,t] / N                  N: loss tokens of the step     (DAPO, arXiv 2503.14476)
    seq-mean-token-sum    c = mask[i,t] / B                  B: branches with a loss token
    seq-mean-token-mean   c = mask[i,t] / (n_i * B)          n_i: loss tokens of branch i   (GRPO, arXiv 2402.03300)

N and B are counted over every group of the optimizer step and every data-parallel rank before the first factor
is computed, each branch once. So the gradient is a plain sum over tokens, whatever the split into micro-batches
and ranks, and nobody downstream divides by anything.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np


SLACK = 1.0 + 1e-6
"""Counts of fractional masks depend on the order they are added in."""


@dataclass(frozen=True)
class Totals:
    """Denominators of one optimizer step; add those of all groups and data-parallel ranks."""

    num_loss_tokens: float = 0.0
    num_sequences: float = 0.0
    """Branches with at least one loss token."""

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.num_loss_tokens + other.num_loss_tokens, self.num_sequences + other.num_sequences)


def count(loss_masks: Sequence[np.ndarray]) -> Totals:
    """Denominators of these branches alone. An empty or fully masked branch counts 0 tokens and 0 sequences.

    Args:
        loss_masks: one [R_i] per branch, of response length.
    """
    num_tokens = [float(np.sum(mask, dtype=np.float64)) for mask in loss_masks]
    return Totals(sum(num_tokens), float(sum(n > 0 for n in num_tokens)))


def _token_mean(mask: np.ndarray, totals: Totals) -> np.ndarray:
    return mask / totals.num_loss_tokens


def _seq_mean_token_sum(mask: np.ndarray, totals: Totals) -> np.ndarray:
    return mask / totals.num_sequences


def _seq_mean_token_mean(mask: np.ndarray, totals: Totals) -> np.ndarray:
    return mask / (mask.sum() * totals.num_sequences)


LOSS_AGG_MODES = {
    "token-mean": _token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-mean": _seq_mean_token_mean,
}


def check_mode(mode: str) -> None:
    """Refuse a name that is no aggregation (ValueError)."""
    if mode not in LOSS_AGG_MODES:
        raise ValueError(f"got loss_agg_mode {mode!r}; need one of {', '.join(LOSS_AGG_MODES)}; change --loss-agg-mode")


def token_scale(loss_masks: Sequence[np.ndarray], mode: str, totals: Totals) -> list[np.ndarray]:
    """The factor c of each token of each branch.

    Args:
        loss_masks: one [R_i] per branch, of response length; any subset of the step's branches.
        mode: a key of LOSS_AGG_MODES.
        totals: counts of the whole step, over all groups and data-parallel ranks.

    Shapes: float64 [R_i] per branch. 0 where the mask is 0; a branch without loss tokens is all zero, so a step
    without any gives zeros, not 0/0.

    Raises:
        ValueError: no such mode, or branches with loss tokens that the totals do not contain.
    """
    check_mode(mode)
    own = count(loss_masks)
    # Counts of a part of the step would weigh every token too much without any other sign.
    if own.num_loss_tokens > totals.num_loss_tokens * SLACK or own.num_sequences > totals.num_sequences * SLACK:
        raise ValueError(f"these branches hold {own}, the totals only {totals}; need the totals of the whole step")
    scales = []
    for loss_mask in loss_masks:
        mask = np.asarray(loss_mask, dtype=np.float64)
        scales.append(LOSS_AGG_MODES[mode](mask, totals) if mask.any() else np.zeros_like(mask))
    return scales
