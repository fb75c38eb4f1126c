"""The gradient of one optimizer step: token weights, and the calls that turn them into `main_grad`.

For every batch of prompts: capture (unless a store is at hand), score where ratios are not 1 by construction,
replay, prefix backward; then one finalize over all ranks. `--schedule full` runs whole sequences instead, with
the same weights.
"""
from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Callable

import numpy as np
import torch
import torch.distributed as dist

from megatron_longstraw.mcore.calls import Table, capture, full_sequences, prefix_backward, replay, score
from megatron_longstraw.mcore.packing import PromptBatch
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.config import AlgorithmConfig
from megatron_longstraw.objectives.advantages import ADVANTAGE_ESTIMATORS
from megatron_longstraw.objectives.aggregation import Totals, count
from megatron_longstraw.objectives.metrics import MetricSums
from megatron_longstraw.objectives.mismatch import rollout_mismatch
from megatron_longstraw.objectives.policy_loss import Objective
from megatron_longstraw.prefix.storage import StoredBytes
from megatron_longstraw.prefix.store import PrefixStore


@dataclass
class Work:
    """One batch of prompts with scored responses, as an update needs it."""

    batch: PromptBatch | None
    """None: nothing left on this rank while expert-parallel peers still work."""
    advantages: dict[tuple[int, int], float] = field(default_factory=dict)
    old_logprobs: Table | None = None
    """Log-probs before the first of several updates; None: this is the first update, old = current, ratio 1."""
    store: PrefixStore | None = None
    """State captured earlier under the current weights, to be used up; None: capture again."""
    tables: dict[str, Table] = field(default_factory=dict)
    """What the last update put in and got out, by what it is."""

    @property
    def store_bytes(self) -> StoredBytes:
        return StoredBytes() if self.store is None else self.store.nbytes

    def branches(self):
        for prompt, group in enumerate(self.batch.groups if self.batch else ()):
            for index, branch in enumerate(group.branches):
                yield (prompt, index), branch

    def nonfinite(self) -> list[str]:
        """A line for each response and table with a number that is not finite."""
        wrong = []
        for what, table in self.tables.items():
            for (prompt, index), values in table.items():
                tokens = np.flatnonzero(~np.isfinite(values))
                if len(tokens):
                    name = f"{what} of group {self.batch.groups[prompt].group_id!r}, branch {index}"
                    wrong.append(f"{name}: {len(tokens)} of {len(values)} tokens, from token {tokens[0]} on")
        return wrong

    def loss_masks(self) -> dict[tuple[int, int], np.ndarray]:
        """Response masks; a response without a score (no advantage) trains nothing."""
        return {place: branch.loss_mask * (place in self.advantages) for place, branch in self.branches()}


def accumulate_gradients(
    policy: Policy, work: list[Work], objective: Objective, between_calls: Callable[[], None] | None = None
) -> MetricSums:
    """Add the gradient of the objective over all work of all ranks to `main_grad` and sum it over ranks, once.

    Args:
        between_calls: called between the calls, on all ranks; what it raises ends the update.

    Returns the metrics of this rank's share (add those of the data-parallel ranks).
    """
    between_calls = between_calls or _nothing
    check_replica_agrees(policy, work)
    totals = global_totals(policy, work)
    metrics = MetricSums()
    kept = sum((item.store_bytes for item in work), StoredBytes())
    policy.zero_grad()
    for item in policy.meter.track("update", work):
        between_calls()
        weigh = _TokenWeights(objective, item, totals)
        if policy.config.prefix.schedule == "full":
            logprobs, entropy = _full_update(policy, item, weigh)
        else:
            kept -= item.store_bytes
            logprobs, entropy = _branch_update(policy, item, weigh, kept, between_calls)
        item.tables = {"token weights": weigh.weights, "log-probs": logprobs}
        metrics = metrics + weigh.metrics(logprobs, entropy)
    policy.finalize_gradients()
    return metrics


def meter_state(policy: Policy, held: StoredBytes) -> None:
    """Prefix states that are held at once."""
    policy.meter.peak("prefix/state_bytes", held.device)
    policy.meter.peak("prefix/host_bytes", held.host)


def _nothing() -> None:
    pass


def _branch_update(
    policy: Policy, item: Work, weigh: _TokenWeights, kept: StoredBytes, between_calls: Callable[[], None]
) -> tuple[Table, Table]:
    """`kept`: states of later work, which are held meanwhile."""
    store = item.store or capture(policy, item.batch)
    item.store = None
    between_calls()
    if item.old_logprobs is not None:
        weigh.at(score(policy, store, item.batch)[0])
    logprobs, entropy = replay(policy, store, item.batch, weigh.weights)
    between_calls()
    if store is not None:  # at its largest: the gradients of K, V have just come
        meter_state(policy, kept + store.nbytes)
    prefix_backward(policy, store, item.batch)
    if store is not None:
        store.release()
    return logprobs, entropy


def _full_update(policy: Policy, item: Work, weigh: _TokenWeights) -> tuple[Table, Table]:
    if item.old_logprobs is not None:
        weigh.at(full_sequences(policy, item.batch, None)[0])
    return full_sequences(policy, item.batch, weigh.weights)


class _TokenWeights:
    """dL/dlogp of one piece of work, by place."""

    def __init__(self, objective: Objective, item: Work, totals: Totals):
        self.objective, self.item = objective, item
        masks = item.loss_masks()
        self.places = list(masks)
        self.advantages = [item.advantages.get(place, 0.0) for place in self.places]
        self.scale = objective.scale(list(masks.values()), totals)
        weights = objective.weights_first_update(self.scale, self.advantages, list(masks.values()))
        self.weights: Table = dict(zip(self.places, weights))

    def at(self, logprobs: Table) -> None:
        """Weights at these current log-probs against the old ones."""
        self.weights = dict(zip(self.places, self._evaluate(logprobs).weights))

    def _evaluate(self, logprobs: Table):
        current = [logprobs.get(place, np.zeros(0, np.float32)) for place in self.places]
        old = self.item.old_logprobs
        before = current if old is None else [old.get(place, np.zeros(0, np.float32)) for place in self.places]
        return self.objective.evaluate(current, before, self.advantages, self.scale)

    def metrics(self, logprobs: Table, entropy: Table) -> MetricSums:
        evaluation = self._evaluate(logprobs)
        trained = [(entropy[place], scale != 0) for place, scale in zip(self.places, self.scale) if place in entropy]
        total = float(sum(values[mask].sum() for values, mask in trained))
        num_tokens = float(sum(mask.sum() for _, mask in trained))
        own = MetricSums(
            means={"actor/entropy": (total, num_tokens)},
            totals={"training/nonfinite_tables": float(not evaluation.is_finite)},
        )
        return evaluation.metrics + own + self._mismatch(logprobs)

    def _mismatch(self, logprobs: Table) -> MetricSums:
        """How far the policy of the step's start is from the one that sampled, where that is known."""
        old = logprobs if self.item.old_logprobs is None else self.item.old_logprobs
        known = [(place, b) for place, b in self.item.branches() if b.rollout_logprobs is not None and place in old]
        return rollout_mismatch(
            [old[place] for place, _ in known], [b.rollout_logprobs for _, b in known], [b.loss_mask for _, b in known]
        )


def check_replica_agrees(policy: Policy, work: list[Work]) -> None:
    """Ranks of one replica (tp, cp, pp) must hold the same batches, or collectives hang or mix up tokens.

    Raises:
        ValueError: they do not (on every rank of the replica).
    """
    digest = hashlib.blake2b(digest_size=7)
    for item in work:
        for prompt, group in enumerate(item.batch.groups if item.batch else ()):
            digest.update(f"{prompt} {group.num_prompt_tokens} {len(group.branches)}".encode())
            digest.update(group.prompt_ids.tobytes())
        for place, branch in item.branches():
            digest.update(f"{place} {branch.num_tokens} {item.advantages.get(place)}".encode())
            digest.update(branch.response_ids.tobytes() + branch.loss_mask.tobytes())
    own = int.from_bytes(digest.digest(), "little")
    extremes = torch.tensor([own, -own], dtype=torch.int64, device=policy.layout.device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=policy.layout.cell)
    if int(extremes[0]) != -int(extremes[1]):
        raise ValueError(
            "ranks of one replica hold different prompts, responses or rewards for the same step; every tensor, "
            "context and pipeline parallel rank must be handed the same groups (check what your data source or "
            "reward depends on: rank, time, unseeded random numbers)"
        )


def global_totals(policy: Policy, work: list[Work]) -> Totals:
    """Loss tokens and sequences of the step over all data-parallel ranks (each prompt lives on one dp rank)."""
    own = Totals()
    for item in work:
        own = own + count(list(item.loss_masks().values()))
    values = torch.tensor([own.num_loss_tokens, own.num_sequences], dtype=torch.float64, device=policy.layout.device)
    if policy.layout.dp_size > 1:
        dist.all_reduce(values, group=policy.layout.groups.dp)
    return Totals(*values.tolist())


def has_signal(policy: Policy, work: list[Work]) -> bool:
    """Whether any token of the step, on any rank, carries weight. Without one the weights must not move."""
    own = any(item.advantages.get(place, 0.0) and mask.any() for item in work for place, mask in item.loss_masks().items())
    flag = torch.tensor(float(own), device=policy.layout.device)
    if policy.layout.dp_size > 1:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=policy.layout.groups.dp)
    return bool(flag)


def advantages_of(batch: PromptBatch | None, algorithm: AlgorithmConfig) -> dict[tuple[int, int], float]:
    """By (prompt, branch); responses without a score or without tokens have none and train nothing. The parts of one
    rollout count once and share its advantage."""
    estimate = ADVANTAGE_ESTIMATORS[algorithm.adv_estimator]
    advantages = {}
    for prompt, group in enumerate(batch.groups if batch else ()):
        rollouts = group.rollouts()
        rewards = [group.branches[parts[0]].reward for parts in rollouts]
        has_tokens = [any(group.branches[index].num_tokens for index in parts) for parts in rollouts]
        values = estimate(rewards, has_tokens, norm_by_std=algorithm.norm_adv_by_std_in_grpo)
        for parts, reward, value in zip(rollouts, rewards, values):
            for index in parts:
                if reward is not None and group.branches[index].num_tokens:
                    advantages[prompt, index] = float(value)
    return advantages


def in_step(policy: Policy, batches: list) -> list:
    """Equally many batches on every expert-parallel peer: ranks that have fewer take part with None."""
    if policy.layout.ep_size == 1:
        return batches
    most = torch.tensor(len(batches), device=policy.layout.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return batches + [None] * (int(most) - len(batches))
