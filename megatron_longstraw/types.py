"""The nouns everybody shares: a prompt, its responses, and the group they form.

numpy only (no torch): ids and masks of a rollout live on the host, whatever computes on them.
"""
from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Sequence

import numpy as np

Ids = Sequence[int] | np.ndarray

LARGEST_REWARD = 1e150
"""Squares of larger rewards overflow float64, and with them the statistics of their group."""


def as_token_ids(ids: Ids) -> np.ndarray:
    """Token ids as a 1-D int64 array.

    Raises:
        ValueError: the ids are not one-dimensional or not whole numbers.
    """
    array = np.asarray(ids)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"token ids must be a flat list of integers, got shape {array.shape} of {array.dtype}")
    return array.astype(np.int64, copy=False)


def prompt_digest(ids: Ids) -> str:
    """16 hexadecimal digits that stand for a prompt's final ids, in files that do not repeat them."""
    return hashlib.sha256(as_token_ids(ids).astype("<i8").tobytes()).hexdigest()[:16]


@dataclass
class Branch:
    """One response to a prompt.

    The tokens it adds to the prefix are the boundary token (the last prompt token) and all but its last
    token; its labels are `response_ids` (DESIGN: the token before a fork belongs to each child).
    """

    response_ids: np.ndarray
    """int64 [R]; exactly the ids that were sampled. May be empty: then it carries no weight."""
    loss_mask: np.ndarray = None
    """float32 [R], of RESPONSE length; 0 where the policy did not write the token (tool output, forced prefix)."""
    reward: float | None = None
    """Scalar outcome; None: no score (left out of its group's statistics, weight 0)."""
    rollout_logprobs: np.ndarray | None = None
    """float32 [R]; log-probability of each token under the distribution it was sampled from."""
    finish_reason: str | None = None
    """"stop" (a stop id was sampled) | "length" (cut at the response limit) | None (not known)."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The other numbers that the reward function returned, by name; they become metrics."""
    reward_failed: bool = False
    """The reward function raised or returned no number, and `reward` is what --reward-error-policy makes of that."""
    trajectory: int | str | None = None
    """Branches of a group with one trajectory are parts of one rollout, with one reward: it counts once in the group's
    statistics. None: a rollout of its own."""

    def __post_init__(self):
        self.response_ids = as_token_ids(self.response_ids)
        num_tokens = len(self.response_ids)
        mask = np.ones(num_tokens) if self.loss_mask is None else np.asarray(self.loss_mask)
        self.loss_mask = mask.astype(np.float32)
        for name in ("loss_mask", "rollout_logprobs"):
            value = getattr(self, name)
            if value is not None and np.shape(value) != (num_tokens,):
                raise ValueError(
                    f"{name} has {np.size(value)} entries for a response of {num_tokens} tokens; "
                    f"it covers the response only, one entry per response token"
                )
        if self.rollout_logprobs is not None:
            self.rollout_logprobs = np.asarray(self.rollout_logprobs, dtype=np.float32)

    @property
    def num_tokens(self) -> int:
        return len(self.response_ids)


@dataclass
class PromptGroup:
    """One prompt and its G responses (a GRPO group)."""

    prompt_ids: np.ndarray
    """int64 [P], P >= 1."""
    branches: list[Branch] = field(default_factory=list)
    group_id: int | str = 0
    """Names the group in messages and keys its random numbers."""
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.prompt_ids = as_token_ids(self.prompt_ids)
        if len(self.prompt_ids) == 0:
            raise ValueError(f"prompt of group {self.group_id!r} is empty; it needs at least one token")

    def rollouts(self) -> list[list[int]]:
        """Places of the branches of each rollout: usually one each (see `Branch.trajectory`)."""
        parts: dict[Any, list[int]] = {}
        for place, branch in enumerate(self.branches):
            parts.setdefault((None, place) if branch.trajectory is None else branch.trajectory, []).append(place)
        return list(parts.values())

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens kept in the prefix state: all of the prompt but its last token."""
        return len(self.prompt_ids) - 1
