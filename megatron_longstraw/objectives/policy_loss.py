"""Policy losses in token-weight form: from a small table of log-probs to w = dL/dlogp.

The loss a training pass runs is sum(w * logp) with w detached: the same gradient as the objective itself, whatever
the objective couples (a token, a sequence, a pair, the batch) and however branches are split afterwards. Loss value
and metrics come from the table; sum(w * logp) has no meaning of its own.

Clipped surrogate (PPO, arXiv 1707.06347; two clip bounds as in DAPO, arXiv 2503.14476):

    r        = exp(policy_logprob - old_logprob)
    token    = max(-A * r, -A * clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high))
    loss     = sum_{i,t} c[i,t] * token[i,t]          c from aggregation.py

Nothing here knows ranks or micro-batches. Shape legend: R_i tokens of response i, T all of them in a row.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Sequence

import numpy as np
import torch
from torch import Tensor

from .aggregation import Totals, check_mode, token_scale
from .metrics import MetricSums

LOG_RATIO_LIMIT = 20.0
"""|log-ratio| is cut here before exp (verl, NeMo-RL): exp(88.8) is inf in float32. Beyond it the gradient is 0."""


@dataclass(frozen=True)
class Evaluation:
    """What an objective says about a table of log-probs."""

    weights: list[np.ndarray]
    """float32 [R_i] per branch, dL/dlogp; exactly 0 where the scale is 0."""
    loss: float
    """This table's share of the global loss: add over groups and data-parallel ranks."""
    metrics: MetricSums
    is_finite: bool
    """False when a log-prob of a loss token, a weight or the loss is NaN or infinite. Not raised here: all ranks
    have to agree on skipping a step, and only the caller can ask them."""


class Objective(Protocol):
    """What the step needs of any loss; sequence-level and pair losses fit the same three calls."""

    def scale(self, loss_masks: Sequence[np.ndarray], totals: Totals) -> list[np.ndarray]: ...

    def weights_first_update(
        self, scale: Sequence[np.ndarray], advantages: Sequence[float], loss_masks: Sequence[np.ndarray]
    ) -> list[np.ndarray]: ...

    def evaluate(
        self,
        policy_logprobs: Sequence[np.ndarray],
        old_logprobs: Sequence[np.ndarray],
        advantages: Sequence[float],
        scale: Sequence[np.ndarray],
    ) -> Evaluation: ...


@dataclass(frozen=True)
class PolicyObjective:
    """Clipped surrogate on token ratios (PPO, GRPO, DAPO)."""

    clip_ratio_low: float = 0.2
    """Offset below 1: ratios under 1 - clip_ratio_low are clipped."""
    clip_ratio_high: float = 0.2
    """Offset above 1: ratios over 1 + clip_ratio_high are clipped (DAPO: 0.28)."""
    loss_agg_mode: str = "token-mean"

    def __post_init__(self):
        for name in ("clip_ratio_low", "clip_ratio_high"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ValueError(
                    f"got {name} {value}; need an offset from 1 in [0, 1): 0.28 clips at 1.28; "
                    f"change --{name.replace('_', '-')}"
                )
        check_mode(self.loss_agg_mode)

    def scale(self, loss_masks: Sequence[np.ndarray], totals: Totals) -> list[np.ndarray]:
        """token_scale with this objective's aggregation: float64 [R_i] per branch."""
        return token_scale(loss_masks, self.loss_agg_mode, totals)

    def weights_first_update(
        self, scale: Sequence[np.ndarray], advantages: Sequence[float], loss_masks: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Weights when the weights that sampled are the weights that train: w = -A * c, no log-probs needed.

        Old log-probs are stop_grad(policy), so every ratio is exactly 1, inside any clip range, and dr/dlogp = 1.
        Equal to evaluate(x, x, ...) of any finite table x, which also gives loss and metrics (zeros will do).

        Args:
            scale: float64 [R_i] per branch, from self.scale.
            advantages: one per branch.
            loss_masks: [R_i] per branch.

        Shapes: float32 [R_i] per branch. Gradient: none, the weights are constants of the training pass.

        Raises:
            ValueError: a branch's entries differ in length.
        """
        _check_lengths(scale=scale, loss_masks=loss_masks, advantages=advantages)
        return [
            np.multiply(-advantage, c, out=np.zeros_like(c), where=np.asarray(mask) != 0).astype(np.float32)
            for c, advantage, mask in zip(scale, advantages, loss_masks)
        ]

    def evaluate(
        self,
        policy_logprobs: Sequence[np.ndarray],
        old_logprobs: Sequence[np.ndarray],
        advantages: Sequence[float],
        scale: Sequence[np.ndarray],
    ) -> Evaluation:
        """Loss, weights and metrics of a table under the current and the old policy.

        Args:
            policy_logprobs: [R_i] per branch, under the weights that will be trained.
            old_logprobs: [R_i] per branch, under the weights the ratio refers to.
            advantages: one per branch.
            scale: float64 [R_i] per branch, from self.scale; 0 marks tokens that are not trained, whose entries
                in the other tables are never read.

        Gradient: taken here in float64 by autograd on the table; nothing flows further.

        Raises:
            ValueError: a branch's entries differ in length (a missing log-prob is not 0.0).
        """
        _check_lengths(policy_logprobs=policy_logprobs, old_logprobs=old_logprobs, scale=scale, advantages=advantages)
        lengths = [len(c) for c in scale]
        policy_T, old_T, c_T = _flat(policy_logprobs), _flat(old_logprobs), _flat(scale)
        advantage_T = _flat([np.full(n, advantage) for n, advantage in zip(lengths, advantages)])
        # Selecting, not multiplying by the mask: 0 * inf is NaN, and pads may hold anything.
        trained = c_T != 0
        policy, old, advantage, c = (x[trained] for x in (policy_T, old_T, advantage_T, c_T))

        with torch.enable_grad():
            policy = policy.detach().requires_grad_()
            log_ratio = torch.clamp(policy - old, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            ratio = log_ratio.exp()
            unclipped = -advantage * ratio
            clipped = -advantage * torch.clamp(ratio, 1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high)
            loss = (c * torch.maximum(unclipped, clipped)).sum()
            (weight,) = torch.autograd.grad(loss, policy)

        weight_T = torch.zeros(len(c_T), dtype=torch.float32)
        weight_T[trained] = weight.float()
        metrics = _metrics(log_ratio.detach(), (clipped > unclipped).detach(), loss.item())
        is_finite = all(bool(x.isfinite().all()) for x in (policy, old, weight_T, loss))
        weights = [weight.numpy() for weight in weight_T.split(lengths)] if lengths else []
        return Evaluation(weights, loss.item(), metrics, is_finite)


def _metrics(log_ratio: Tensor, is_clipped: Tensor, loss: float) -> MetricSums:
    """verl's names; over loss tokens only. ratio_mean and ratio_max are 1 as long as no update has happened."""
    num_tokens, ratio = float(len(log_ratio)), log_ratio.exp()
    return MetricSums(
        means={
            "actor/pg_clipfrac": (is_clipped.sum().item(), num_tokens),
            "actor/ppo_kl": (-log_ratio.sum().item(), num_tokens),
            "actor/ratio_mean": (ratio.sum().item(), num_tokens),
        },
        totals={"actor/pg_loss": loss},
        maxima={"actor/ratio_max": ratio.max().item() if num_tokens else -np.inf},
    )


def _flat(per_branch: Sequence[np.ndarray]) -> Tensor:
    """float64 [T] of all branches in a row."""
    return torch.from_numpy(np.concatenate([np.zeros(0), *(np.asarray(x, dtype=np.float64) for x in per_branch)]))


def _check_lengths(scale: Sequence[np.ndarray], advantages: Sequence[float], **tables: Sequence[np.ndarray]) -> None:
    """One entry per branch in every argument, one number per token in every table."""
    for name, table in {"advantages": advantages, **tables}.items():
        if len(table) != len(scale):
            raise ValueError(f"got {len(table)} {name} for {len(scale)} branches; need one per branch")
    for name, table in tables.items():
        for i, (values, c) in enumerate(zip(table, scale)):
            if np.shape(values) != np.shape(c):
                raise ValueError(
                    f"{name} of branch {i} has {np.size(values)} entries for a response of {np.size(c)} tokens; "
                    f"need one per response token"
                )
