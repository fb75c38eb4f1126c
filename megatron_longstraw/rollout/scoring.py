"""Scoring a replica's responses: one rank calls the user's function, the others receive its answers."""
from __future__ import annotations

from typing import Any, Callable

import numpy as np
import torch.distributed as dist

from megatron_longstraw.mcore.parallel import Layout
from megatron_longstraw.objectives.metrics import MetricSums
from megatron_longstraw.rewards.loading import RewardError, RewardReport, score_group
from megatron_longstraw.types import Branch, PromptGroup


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
                rewards = [[(branch.reward, branch.rewards) for branch in group.branches] for group in groups]
                answer = [(report, rewards)]
            except RewardError as error:
                failure, answer = error, [str(error)]
        leader = dist.get_process_group_ranks(layout.cell)[0]
        dist.broadcast_object_list(answer, src=leader, group=layout.cell)
        if isinstance(answer[0], str):
            raise failure or RewardError(answer[0])
        report, rewards = answer[0]
        for group, values in zip(groups, rewards):
            for branch, (reward, others) in zip(group.branches, values):
                branch.reward, branch.rewards = reward, others
        return rollout_metrics(groups, report)

    def _score_here(self, groups: list[PromptGroup]) -> RewardReport:
        report = RewardReport()
        for group in groups:
            texts = [self.render(branch.response_ids) for branch in group.branches]
            report = report + score_group(group, texts, self.reward_function, self.error_policy)
        return report


def given_report(groups: list[PromptGroup]) -> RewardReport:
    """The report of responses whose rewards were given along with them."""
    branches = [branch for group in groups for branch in group.branches]
    empty = sum(branch.num_tokens == 0 for branch in branches)
    abstained = sum(branch.reward is None and branch.num_tokens > 0 for branch in branches)
    return RewardReport(scored=len(branches) - empty - abstained, abstained=abstained, empty=empty)


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
