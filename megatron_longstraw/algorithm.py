"""One RL step, top to bottom: roll out, score, replay, walk the prompts back, update.

How it differs from a textbook GRPO step:
1. The prompt runs once per optimizer step, not once per response: `capture` keeps each layer's K, V, rollout
   decodes against them, and `replay` trains the responses against them (gradients.py, mcore/calls.py).
2. `prefix_backward` carries the gradient that responses send to the prompt through it, chunk by chunk, last chunk
   first. With it the gradient equals full-sequence training; `--prefix-grad frozen` leaves it out (biased).
3. The loss reaches the model as token weights w = dL/dlogp, normalised over the whole batch beforehand, so no
   split into micro-batches or ranks changes it. Gradients are summed over ranks once per update.
4. Old log-probs are those of the weights at the start of the step: with one update the ratio is exactly 1 and no
   scoring pass is needed; with several, they are scored before the first. So they are with given responses (a
   rollout file), whoever sampled those; how far that policy is from this one is reported.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable

import torch
import torch.distributed as dist

from megatron_longstraw.gradients import Work, accumulate_gradients, advantages_of, has_signal, in_step, meter_state
from megatron_longstraw.interruption import Interrupted, StopRequest
from megatron_longstraw.mcore.calls import capture, score
from megatron_longstraw.mcore.optimizer import PolicyOptimizer, gradients_finite, nonfinite_gradients
from megatron_longstraw.mcore.packing import PromptBatch, batch_prompts
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.objectives.metrics import MetricSums
from megatron_longstraw.objectives.policy_loss import PolicyObjective
from megatron_longstraw.prefix.storage import StoredBytes
from megatron_longstraw.prefix.store import PrefixStore
from megatron_longstraw.rollout.scoring import Scorer, report_of, rollout_metrics
from megatron_longstraw.rollout.generate import generate
from megatron_longstraw.rollout.in_progress import FinishedGroups
from megatron_longstraw.types import PromptGroup


@dataclass
class NonFinite:
    """What was not finite in an update that was left out for it, on this rank."""

    update: int
    """Updates of the step that were tried before."""
    gradients: list[str]
    """Parameters, by their names in the whole model."""
    tables: list[str]
    """Token weights and log-probs, by response."""


@dataclass
class StepReport:
    """What one RL step did."""

    groups: list[PromptGroup]
    """This data-parallel rank's groups, with their responses and rewards."""
    metrics: MetricSums
    """This rank's share; add those of the data-parallel ranks."""
    updates: int = 0
    skipped: list[str] = field(default_factory=list)
    """Why updates did not happen: "no signal" or "not finite"."""
    updated: list[PromptGroup] = field(default_factory=list)
    """Groups whose gradient was computed, once per update they were part of."""
    nonfinite: NonFinite | None = None
    """Of the last update that was not finite."""


class RLStep:
    """Everything a step needs that outlives it.

    Args:
        scorer: None when groups come with their responses and rewards, which are trained on as they are.
        save: called with (step, the global batch of which this rank's groups have their scored responses) before the
            first update, so that what an update fails on is there to be looked at.
        finished: keeps scored responses on the disk as they come; None: they are lost when the step does not end.
        stop: looked at between calls; None: a step always runs to its end.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: PolicyOptimizer,
        scorer: Scorer | None,
        save: Callable[[int, list[PromptGroup]], None] | None = None,
        finished: FinishedGroups | None = None,
        stop: StopRequest | None = None,
    ):
        self.policy, self.optimizer, self.scorer, self.save = policy, optimizer, scorer, save
        self.finished, self.stop = finished, stop
        algorithm = policy.config.algorithm
        self.objective = PolicyObjective(algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.loss_agg_mode)

    def run(self, step: int, groups: list[PromptGroup]) -> StepReport:
        """One step on the global batch `groups` (the same list on every rank).

        Raises:
            ValueError: responses are to be given, and a group has none.
            Interrupted: a stop was asked for before the first update; the weights are those of the step's start.
        """
        algorithm = self.policy.config.algorithm
        if self.finished is not None and self.scorer is not None:
            self.finished.begin(step, self.scorer.identity)
        minibatches = self._split(groups)
        self._roll_out(step, minibatches, score_old=algorithm.ppo_epochs * len(minibatches) > 1)
        own = [group for work in minibatches for item in work if item.batch for group in item.batch.groups]
        for group in own:
            if not group.branches:
                raise ValueError(f"group {group.group_id!r} has no responses; need them along with the prompt")
        report = StepReport(own, rollout_metrics(own, report_of(own)))
        if self.save is not None:
            self.save(step, groups)
            self.stop_if_asked()
        for work in minibatches:
            for item in work:
                item.advantages = advantages_of(item.batch, algorithm)
        for _ in range(algorithm.ppo_epochs):
            for work in minibatches:
                self._update(work, report)
        release(minibatches)
        return report

    def _split(self, groups: list[PromptGroup]) -> list[list[Work]]:
        """Whole groups into mini-batches, each dealt over the data-parallel ranks."""
        config, layout = self.policy.config, self.policy.layout
        size = config.algorithm.ppo_mini_batch_size
        minibatches = []
        for begin in range(0, len(groups), size):
            own = groups[begin : begin + size][layout.dp_rank :: layout.dp_size]
            batches = batch_prompts(own, config.prefix.prompts_per_microbatch)
            minibatches.append([Work(batch) for batch in in_step(self.policy, batches)])
        return minibatches

    def _roll_out(self, step: int, minibatches: list[list[Work]], score_old: bool) -> None:
        """Capture, sample and score every prompt; the first mini-batch's stores stay for its update, budget permitting."""
        if self.scorer is None and not score_old:
            return
        kept = StoredBytes()
        for number, work in enumerate(minibatches):
            for item in self.policy.meter.track("sample", work):
                self.stop_if_asked()
                store = capture(self.policy, item.batch, walk_back=number == 0)
                if self.scorer is not None:
                    self._sample(step, store, item.batch)
                if score_old:
                    item.old_logprobs, _ = score(self.policy, store, item.batch)
                held = kept if store is None else kept + store.nbytes
                meter_state(self.policy, held)
                if number == 0 and self._fits(held.total):
                    item.store, kept = store, held
                elif store is not None:
                    store.release()

    def _sample(self, step: int, store: PrefixStore | None, batch: PromptBatch | None) -> None:
        kept = self.finished is not None and self.finished.load(step, batch)
        # Expert-parallel peers need a partner in their decoding steps, whether or not this rank has something to do.
        generate(self.policy, store, None if kept else batch, step=step)
        if batch is None or kept:
            return
        with self.policy.meter.measure("reward"):
            self.scorer.score(self.policy.layout, batch.groups)
        if self.finished is not None:
            self.finished.keep(step, batch)

    def stop_if_asked(self) -> None:
        """Between calls, by all ranks at once.

        Raises:
            Interrupted: any rank was asked to stop.
        """
        if self.stop is None:
            return
        asked = torch.tensor(float(self.stop.asked), device=self.policy.layout.device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if asked:
            raise Interrupted("asked to stop")

    def _fits(self, num_bytes: int) -> bool:
        budget = self.policy.config.prefix.prefix_state_budget
        if self.policy.config.prefix.schedule == "full":
            return False
        fits = torch.tensor(float(budget is None or num_bytes <= budget), device=self.policy.layout.device)
        # Capturing again is a call that pipeline, context and expert peers take part in: all decide alike.
        dist.all_reduce(fits, op=dist.ReduceOp.MIN, group=None if self.policy.layout.ep_size > 1 else self.policy.layout.cell)
        return bool(fits)

    def _update(self, work: list[Work], report: StepReport) -> None:
        """One optimizer step, or the reason why not; without one weights, optimizer and schedule stay untouched."""
        if not has_signal(self.policy, work):
            report.skipped.append("no signal")
            return
        # After an update the weights are in between two steps, and only the step's end is a place to stop.
        between_calls = self.stop_if_asked if report.updates == 0 else None
        metrics = accumulate_gradients(self.policy, work, self.objective, between_calls)
        report.metrics = report.metrics + metrics
        report.updated += [group for item in work if item.batch for group in item.batch.groups]
        if not gradients_finite(self.policy):
            tables = [text for item in work for text in item.nonfinite()]
            tried = report.updates + len(report.skipped)
            report.nonfinite = NonFinite(tried, nonfinite_gradients(self.policy), tables)
            report.skipped.append("not finite")
            return
        with self.policy.meter.measure("optimizer"):
            result = self.optimizer.step()
        report.updates += 1
        share = 1.0 / self.policy.layout.dp_size  # every rank reports the same value
        report.metrics = report.metrics + MetricSums(
            means={"actor/grad_norm": (result.grad_norm * share, share), "actor/lr": (result.lr * share, share)}
        )


def release(minibatches: list[list[Work]]) -> None:
    """Free stores that no update used up."""
    for item in (item for work in minibatches for item in work):
        if isinstance(item.store, PrefixStore):
            item.store.release()
        item.store = None
