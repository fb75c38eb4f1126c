"""The loop around the step: prompts in, metrics out.

    torchrun --nproc-per-node 2 -m megatron_longstraw.train --context-parallel-size 2 \\
        --train-files prompts.jsonl --tokenizer-model model_folder --reward-function mytask:score ...
"""
from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy as np
import torch
import torch.distributed as dist

from megatron_longstraw.agreement import check_ranks_agree
from megatron_longstraw.algorithm import RLStep, StepReport
from megatron_longstraw.config import Config, parse_args
from megatron_longstraw.convert.adopt import check_window, open_folder, with_model_of
from megatron_longstraw.data.task import Task, check_prompts
from megatron_longstraw.interruption import Interrupted, StopRequest
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.hf_weights import check_target, save_hf
from megatron_longstraw.mcore.optimizer import PolicyOptimizer
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.mcore.training_state import CheckpointError, Progress, TrainingState, find_start
from megatron_longstraw.metering import Meter
from megatron_longstraw.objectives.metrics import MetricSums
from megatron_longstraw.rewards.loading import RewardError, load_function
from megatron_longstraw.rollout.files import RolloutSaver
from megatron_longstraw.rollout.in_progress import FinishedGroups
from megatron_longstraw.rollout.scoring import Scorer
from megatron_longstraw.run_log import RunLog, check_sinks, peak_memory_bytes
from megatron_longstraw.sources import describe, task_maker, training_source, with_stop_ids
from megatron_longstraw.user_errors import report as report_error
from megatron_longstraw.watchdog import Watchdog


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why."""


@dataclass
class RunSummary:
    rewards: list[float]
    """Mean score of the rollouts of each step."""
    calls: dict[str, tuple[float, int]]
    """Seconds and tokens put through the stack, by call."""
    tokens_dense: int
    """Prompt tokens that whole sequences would have run in the same updates (every response with its prompt)."""

    def mean_reward(self, steps: slice) -> float:
        return float(np.mean(self.rewards[steps]))


def train(
    policy: Policy,
    task: Task,
    log: RunLog,
    optimizer: PolicyOptimizer | None = None,
    state: TrainingState | None = None,
    progress: Progress | None = None,
    stop: StopRequest | None = None,
) -> RunSummary:
    """Run RL steps on a policy until `train_iters` are done. With `--rollout-file`, `task` is its reader.

    Args:
        optimizer: None: a new one.
        state: writes the checkpoints that --save asks for; None: none are written.
        progress: the steps that are done already.
        stop: says when to stop ahead of time.

    Raises:
        Interrupted: it was asked to stop, and has written a checkpoint where --save asks for any.
    """
    config = policy.config
    optimizer, progress = optimizer or PolicyOptimizer(policy), progress or Progress()
    scorer = save = None
    if config.data.rollout_file is None:
        scorer = Scorer(load_function(config.reward.reward_function), config.reward.reward_error_policy, task.render)
        path = log.folder / "rollouts.jsonl"
        save = RolloutSaver(policy.layout, path, progress.steps) if config.data.save_rollouts else None
    finished = None if state is None or config.checkpoint.save is None else FinishedGroups(policy, config.checkpoint.save)
    rl_step = RLStep(policy, optimizer, scorer, save, finished, stop)
    total, tokens_dense, rewards = Meter(), 0, list(log.rewards)
    policy.meter.watcher = log.progress
    policy.watchdog = watchdog = Watchdog(60.0 * config.parallel.distributed_timeout_minutes)
    try:
        for step in range(progress.steps, config.run.train_iters):
            begin = time.perf_counter()
            watchdog.alive()
            policy.meter.reset()
            groups = task.prompts(step, config.algorithm.train_batch_size)
            check_prompts(groups, config.model.vocab_size, config.rollout)
            report = rl_step.run(step, groups)
            metrics = step_metrics(policy, report, time.perf_counter() - begin)
            tokens_dense += int(metrics["prefix/tokens_dense"])
            rewards.append(metrics["critic/score/mean"])
            for name, cost in policy.meter.costs.items():
                total.costs[name].seconds += cost.seconds
                total.costs[name].tokens += cost.tokens
            log.step(step, metrics, report.skipped)
            progress.steps = step + 1
            progress.nonfinite_in_a_row = progress.nonfinite_in_a_row + 1 if "not finite" in report.skipped else 0
            _stop_if_nonfinite(config, step, progress.nonfinite_in_a_row)
            if state is not None:
                state.after_step(progress)
            rl_step.stop_if_asked()
    except Interrupted:
        if state is not None:
            state.save_unless_saved(progress)
        raise
    finally:
        watchdog.stop()
    if state is not None:
        state.finish_writing()
    calls = {name: (cost.seconds, cost.tokens) for name, cost in total.costs.items()}
    return RunSummary(rewards, calls, tokens_dense)


def step_metrics(policy: Policy, report: StepReport, step_s: float) -> dict[str, float]:
    """The step's metrics over all data-parallel ranks, by verl's names."""
    meter, prefix = policy.meter, policy.config.prefix
    once = meter.tokens("capture") + meter.tokens("prefix_backward") if prefix.schedule == "branch" else meter.tokens("full")
    dense = sum(group.num_prefix_tokens for group in report.updated for branch in group.branches if branch.num_tokens)
    handled = sum(group.num_prompt_tokens + branch.num_tokens for group in report.groups for branch in group.branches)
    own = MetricSums(
        totals={
            "prefix/tokens_once": float(once),
            "prefix/tokens_dense": float(dense),
            "perf/total_num_tokens": float(handled),
            "training/updates": report.updates / policy.layout.dp_size,
            "training/nonfinite_steps": report.skipped.count("not finite") / policy.layout.dp_size,
            "training/no_signal_steps": report.skipped.count("no signal") / policy.layout.dp_size,
        }
    )
    metrics = merge(policy, report.metrics + own).to_means()
    once, dense = metrics["prefix/tokens_once"], metrics["prefix/tokens_dense"]
    metrics["prefix/saved_fraction"] = 1.0 - once / dense if dense else 0.0
    metrics["prefix/state_bytes"], peak_bytes = largest(policy, [meter.peaks.get("prefix/state_bytes", 0), peak_memory_bytes()])
    metrics["perf/max_memory_allocated_gb"] = peak_bytes / 2**30
    metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / step_s / dist.get_world_size()
    metrics["timing_s/step"] = step_s
    for name, cost in meter.costs.items():
        metrics[f"timing_s/{name}"] = cost.seconds
    return metrics


def merge(policy: Policy, own: MetricSums) -> MetricSums:
    """Add up over data-parallel ranks (the ranks of a replica already agree); names may differ between ranks."""
    if policy.layout.dp_size == 1:
        return own
    parts: list[MetricSums | None] = [None] * policy.layout.dp_size
    dist.all_gather_object(parts, own, group=policy.layout.groups.dp)
    merged = MetricSums()
    for part in parts:
        merged = merged + part
    return merged


def largest(policy: Policy, values: list[float]) -> list[float]:
    """Each value's maximum over all ranks."""
    maxima = torch.tensor(values, dtype=torch.float64, device=policy.layout.device)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return maxima.tolist()


def _stop_if_nonfinite(config: Config, step: int, in_a_row: int) -> None:
    if in_a_row and config.run.nonfinite_policy == "stop":
        raise TrainingStopped(f"step {step}: loss or gradient is not finite (--nonfinite-policy stop)")
    if in_a_row >= config.run.max_consecutive_nonfinite_steps:
        raise TrainingStopped(
            f"step {step}: loss or gradient was not finite {in_a_row} times in a row "
            f"(--max-consecutive-nonfinite-steps {config.run.max_consecutive_nonfinite_steps}); lower --lr"
        )


def print_summary(log: RunLog, config: Config, summary: RunSummary) -> None:
    window = min(5, len(summary.rewards))
    log.say()
    log.say(f"reward     first {window} steps {summary.mean_reward(slice(window)):.3f}   "
            f"last {window} steps {summary.mean_reward(slice(-window, None)):.3f}")
    once = sum(summary.calls.get(name, (0.0, 0))[1] for name in ("capture", "prefix_backward"))
    if config.prefix.schedule == "branch" and once:
        log.say(
            f"prompts    {once:,} prompt tokens run (capture and prefix backward); whole sequences would have run "
            f"{summary.tokens_dense:,} forward and backward"
        )
    for name, (seconds, tokens) in summary.calls.items():
        log.say(f"{name:<16}{seconds:9.2f} s" + (f" {tokens:12,} tokens" if tokens else ""))
    log.say(f"memory     peak {peak_memory_bytes() / 2**20:.0f} MiB on rank 0")
    log.say(f"metrics    {log.folder / 'metrics.jsonl'}")
    picture = log.plot_rewards()
    log.say(f"curve      {picture}" if picture else "curve      not drawn: pip install 'megatron_longstraw[logging]'")


def run(config: Config) -> RunSummary:
    """Build everything a configuration names, and train.

    Raises:
        ConfigError: what was asked for cannot be run; nothing has been computed or written.
    """
    folder = open_folder(config)
    config = with_model_of(config, folder).resolve()
    check_window(config, folder)
    if config.checkpoint.save_hf is not None:
        check_target(Path(config.checkpoint.save_hf))
    check_sinks(config)
    load_function(config.reward.reward_function)
    make_task = task_maker(config)
    layout = parallel.initialize(config)
    task = None if make_task is None else make_task(config)
    config = with_stop_ids(config, task)
    source = training_source(config, task)
    first = source.prompts(0, config.algorithm.train_batch_size)
    check_prompts(first, config.model.vocab_size, config.rollout)
    check_ranks_agree(config, first)
    start = find_start(config.checkpoint)
    policy = Policy(config, layout, folder, start.checkpoint)
    optimizer = PolicyOptimizer(policy)
    state = TrainingState(policy, optimizer)
    progress = state.restore(start)
    stop = StopRequest()
    stop.listen()
    log = RunLog(policy.config, active=dist.get_rank() == 0, first_step=progress.steps)
    try:
        for warning in folder.warnings if folder else ():
            log.say(f"warning    {warning}")
        log.say(f"layout     {policy.describe()}")
        log.say(f"prompts    {describe(source)}")
        for note in start.notes:
            log.say(f"checkpoint {note}")
        summary = train(policy, source, log, optimizer, state, progress, stop)
        print_summary(log, config, summary)
        if config.checkpoint.save_hf is not None:
            for note in save_hf(policy.chunks, config.model, folder, config.checkpoint.save_hf):
                log.say(f"export     {note}")
            log.say(f"model      {config.checkpoint.save_hf}")
    finally:
        log.close()
    return summary


def exit_status(body: Callable[[], object]) -> int:
    """Run a program's body: 0 (also where it stopped on request), or 1 with one line on the screen for what a user can mend (anything else is a bug and
    keeps its traceback). Leaves the process group either way."""
    try:
        body()
    except Interrupted as stop:
        if os.environ.get("RANK", "0") == "0":
            print(f"stopped: {stop}; the same command goes on from the checkpoint", flush=True)
    except (ValueError, RewardError, TrainingStopped, CheckpointError) as error:
        report_error(error)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: run(parse_args())))
