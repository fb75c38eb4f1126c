"""How far the policy that trains is from the one that sampled: another engine, other weights, or a cut-off nucleus."""
from __future__ import annotations

from typing import Sequence

import numpy as np

from .metrics import MetricSums


def rollout_mismatch(
    policy_logprobs: Sequence[np.ndarray], rollout_logprobs: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray]
) -> MetricSums:
    """verl's names, over the tokens that the policy wrote (loss_mask not 0); nothing without any.

        training/rollout_probs_diff_mean, _max    |exp(rollout) - exp(policy)|
        rollout_corr/kl                           mean of rollout - policy, an estimate of KL(rollout || policy)

    Args:
        policy_logprobs, rollout_logprobs, loss_masks: [R_i] per branch.
    """
    pairs = [
        (np.asarray(rollout, dtype=np.float64)[mask != 0], np.asarray(policy, dtype=np.float64)[mask != 0])
        for policy, rollout, mask in zip(policy_logprobs, rollout_logprobs, map(np.asarray, loss_masks), strict=True)
    ]
    rollout, policy = (np.concatenate([pair[side] for pair in pairs] or [np.zeros(0)]) for side in (0, 1))
    if not len(rollout):
        return MetricSums()
    difference = np.abs(np.exp(rollout) - np.exp(policy))
    num_tokens = float(len(rollout))
    return MetricSums(
        means={
            "training/rollout_probs_diff_mean": (float(difference.sum()), num_tokens),
            "rollout_corr/kl": (float((rollout - policy).sum()), num_tokens),
        },
        maxima={"training/rollout_probs_diff_max": float(difference.max())},
    )
