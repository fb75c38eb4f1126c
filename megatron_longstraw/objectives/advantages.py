"""Advantages: how much better each response of a group is than its peers (no critic).

GRPO (arXiv 2402.03300, section 4.1.2), one scalar per response, the same for all of its tokens:

    A_i = (r_i - mean(r)) / (std(r) + 1e-6)      std unbiased (ddof=1), as torch.std and verl
    A_i =  r_i - mean(r)                         norm_by_std=False (Dr. GRPO, arXiv 2503.20783)

mean and std are those of one group: never of the batch. Leave-one-out baselines (RLOO) are another estimator.
"""
from __future__ import annotations

from typing import Callable, Sequence

import numpy as np

from ..types import LARGEST_REWARD

STD_EPSILON = 1e-6
"""Added to the std, as in verl, slime and SkyRL. Changing it changes training."""

ZERO_VARIANCE_TOLERANCE = 1e-6
"""A std below this (relative to max(1, |mean|)) is the rounding of equal float32 rewards, not a signal."""


def group_advantages(
    rewards: Sequence[float | None], has_tokens: Sequence[bool], *, norm_by_std: bool = True
) -> np.ndarray:
    """GRPO advantages of one group.

    A response without a reward (None) and an empty response are left out of mean and std and get 0. A response
    whose loss mask is all zero (truncated and masked) still has tokens: it stays in the statistics, only its
    tokens carry no weight.

    Args:
        rewards: [G], None where there is no score.
        has_tokens: [G], False for an empty response.
        norm_by_std: divide by the std of the group.

    Shapes: float64 [G]. All zero when the scored rewards are (nearly) equal or fewer than two; never NaN.

    Raises:
        ValueError: lengths differ, or a reward is NaN, infinite or too large to square.
    """
    if len(rewards) != len(has_tokens):
        raise ValueError(f"got {len(rewards)} rewards for {len(has_tokens)} responses; need one reward per response")
    advantages = np.zeros(len(rewards), dtype=np.float64)
    scored = [i for i, (reward, tokens) in enumerate(zip(rewards, has_tokens)) if reward is not None and tokens]
    values = np.array([rewards[i] for i in scored], dtype=np.float64)
    usable = np.abs(values) < LARGEST_REWARD  # False for NaN too
    if not usable.all():
        raise ValueError(
            f"got reward {values[~usable][0]} in a group of {len(rewards)}; need finite rewards below "
            f"{LARGEST_REWARD:g} in size; --reward-error-policy zero or skip handles rewards that are not numbers"
        )
    if len(values) < 2:
        return advantages
    mean, std = values.mean(), values.std(ddof=1)
    if std <= ZERO_VARIANCE_TOLERANCE * max(1.0, abs(mean)):
        return advantages
    advantages[scored] = (values - mean) / (std + STD_EPSILON if norm_by_std else 1.0)
    return advantages


ADVANTAGE_ESTIMATORS: dict[str, Callable[..., np.ndarray]] = {"grpo": group_advantages}
"""--adv-estimator by name; every entry has the signature of group_advantages."""
