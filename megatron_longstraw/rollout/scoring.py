"""Scoring a replica's responses: one rank calls the user's function, the others receive its answers."""
from __future__ import annotations

import hashlib
from typing import Any, Callable

import numpy as np
import torch.distributed as dist

from megatron_longstraw.mcore.parallel import Layout
from megatron_longstraw.objectives.metrics import MetricSums
from megatron_longstraw.rewards.loading import RewardError, RewardReport, score_group, source_of
from megatron_longstraw.types import Branch, PromptGroup


class Scorer:
    """A reward function, how its failures are handled, and how ids become the text it sees."""

    def __init__(self, reward_function: Callable[..., Any], error_policy: str, render: Callable[[np.ndarray], str]):
        self.reward_function, self.error_policy, self.render = reward_function, error_policy, render
        self.identity = hashlib.sha256(source_of(reward_function) + error_policy.encode()).hexdigest()
        """Equal for scorers that give equal rewards, as far as that can be told."""

    def score(self, layout: Layout, groups: list[PromptGroup]) -> None:
        """Set the reward of every branch, alike on all ranks of the replica.

        Raises:
            RewardError: the function failed and the policy is "fail" (on every rank of the replica).
        """
        answer: list[Any] = [None]
        failure = None
        if layout.is_cell_leader:
            try:
                self._score_here(groups)
                answer = [[(b.reward, b.rewards, b.reward_failed) for group in groups for b in group.branches]]
            except RewardError as error:
                failure, answer = error, [str(error)]
        leader = dist.get_process_group_ranks(layout.cell)[0]
        dist.broadcast_object_list(answer, src=leader, group=layout.cell)
        if isinstance(answer[0], str):
            raise failure or RewardError(answer[0])
        for branch, values in zip((branch for group in groups for branch in group.branches), answer[0]):
            branch.reward, branch.rewards, branch.reward_failed = values

    def _score_here(self, groups: list[PromptGroup]) -> None:
        for group in groups:
            texts = [self.render(branch.response_ids) for branch in group.branches]
            score_group(group, texts, self.reward_function, self.error_policy)


def report_of(groups: list[PromptGroup]) -> RewardReport:
    """What happened to responses when they were scored, in this run or in the one that they were kept from."""
    branches = [branch for group in groups for branch in group.branches]
    empty = sum(branch.num_tokens == 0 for branch in branches)
    failed = sum(branch.reward_failed for branch in branches)
    abstained = sum(b.reward is None and b.num_tokens > 0 and not b.reward_failed for b in branches)
    return RewardReport(len(branches) - empty - failed - abstained, abstained, failed, empty)


def rollout_metrics(groups: list[PromptGroup], report: RewardReport) -> MetricSums:
    """verl's names. Every rollout counts once; unscored and empty ones do not enter the score."""
    branches = [branch for group in groups for branch in group.branches]
    scored = [branch for group in groups for branch in _scored(group)]
    lengths = [branch.num_tokens for branch in branches]
    flat = sum(len({branch.reward for branch in _scored(group)}) <= 1 for group in groups)
    metrics = MetricSums(
        means={
            "critic/score/mean": (float(sum(branch.reward for branch in scored)), float(len(scored))),
            "response_length/mean": (float(sum(lengths)), float(len(lengths))),
            "response_length/clip_ratio": (
                float(sum(branch.finish_reason == "length" for branch in branches)),
                float(len(branches)),
            ),
            "prompt_length/mean": (float(sum(group.num_prompt_tokens for group in groups)), float(len(groups))),
            "frac_reward_zero_std": (float(flat), float(len(groups))),
        },
        totals={
            "reward/abstained": float(report.abstained),
            "reward/failed": float(report.failed),
            "reward/empty": float(report.empty),
        },
        maxima={
            "critic/score/max": max((branch.reward for branch in scored), default=-np.inf),
            "response_length/max": float(max(lengths, default=-np.inf)),
        },
    )
    for branch in (group.branches[parts[0]] for group in groups for parts in group.rollouts()):
        others = {f"reward/{name}": (number, 1.0) for name, number in branch.rewards.items()}
        metrics = metrics + MetricSums(means=others)
    return metrics


def _scored(group: PromptGroup) -> list[Branch]:
    """One branch of every rollout that has tokens and a score."""
    parts = ([group.branches[place] for place in places] for places in group.rollouts())
    with_tokens = ([branch for branch in branches if branch.num_tokens] for branches in parts)
    return [branches[0] for branches in with_tokens if branches and branches[0].reward is not None]
