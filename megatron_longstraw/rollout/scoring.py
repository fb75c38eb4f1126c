"""Scoring a replica's responses: one rank calls the user's function, the others receive its answers."""
from __future__ import annotations

from typing import Any, Callable

import numpy as np
import torch.distributed as dist

from megatron_longstraw.mcore.parallel import Layout
from megatron_longstraw.objectives.metrics import MetricSums
from megatron_longstraw.rewards.loading import RewardError, RewardReport, score_group
from megatron_longstraw.types import PromptGroup


class Scorer:
    """A reward function, how its failures are handled, and how ids become the text it sees."""

    def __init__(self, reward_function: Callable[..., Any], error_policy: str, render: Callable[[np.ndarray], str]):
        self.reward_function, self.error_policy, self.render = reward_function, error_policy, render

    def score(self, layout: Layout, groups: list[PromptGroup]) -> MetricSums:
        """Set the reward of every branch, alike on all ranks of the replica, and return this replica's metrics.

        Raises:
            RewardError: the function failed and the policy is "fail" (on every rank of the replica).
        """
        answer: list[Any] = [None]
        failure = None
        if layout.is_cell_leader:
            try:
                report = self._score_here(groups)
                answer = [(report, [[branch.reward for branch in group.branches] for group in groups])]
            except RewardError as error:
                failure, answer = error, [str(error)]
        leader = dist.get_process_group_ranks(layout.cell)[0]
        dist.broadcast_object_list(answer, src=leader, group=layout.cell)
        if isinstance(answer[0], str):
            raise failure or RewardError(answer[0])
        report, rewards = answer[0]
        for group, values in zip(groups, rewards):
            for branch, reward in zip(group.branches, values):
                branch.reward = reward
        return rollout_metrics(groups, report)

    def _score_here(self, groups: list[PromptGroup]) -> RewardReport:
        report = RewardReport()
        for group in groups:
            texts = [self.render(branch.response_ids) for branch in group.branches]
            report = report + score_group(group, texts, self.reward_function, self.error_policy)
        return report


def rollout_metrics(groups: list[PromptGroup], report: RewardReport) -> MetricSums:
    """verl's names. Every response counts once; unscored ones do not enter the score."""
    branches = [branch for group in groups for branch in group.branches]
    scores = [branch.reward for branch in branches if branch.reward is not None]
    lengths = [branch.num_tokens for branch in branches]
    flat = sum(_no_spread(group) for group in groups)
    extra = {f"reward/{name}": value for name, value in report.extra_metrics.items()}
    return MetricSums(
        means={
            "critic/score/mean": (float(sum(scores)), float(len(scores))),
            "response_length/mean": (float(sum(lengths)), float(len(lengths))),
            "response_length/clip_ratio": (
                float(sum(branch.finish_reason == "length" for branch in branches)),
                float(len(branches)),
            ),
            "prompt_length/mean": (float(sum(group.num_prompt_tokens for group in groups)), float(len(groups))),
            "frac_reward_zero_std": (float(flat), float(len(groups))),
            **extra,
        },
        totals={
            "reward/abstained": float(report.abstained),
            "reward/failed": float(report.failed),
            "reward/empty": float(report.empty),
        },
        maxima={
            "critic/score/max": max(scores, default=-np.inf),
            "response_length/max": float(max(lengths, default=-np.inf)),
        },
    )


def _no_spread(group: PromptGroup) -> bool:
    scores = [branch.reward for branch in group.branches if branch.reward is not None]
    return len(set(scores)) <= 1
