"""The loop around the step: prompts in, metrics out.

    torchrun --nproc-per-node 2 -m megatron_longstraw.train --context-parallel-size 2 \\
        --train-files prompts.jsonl --tokenizer-model model_folder --reward-function mytask:score ...
"""
from __future__ import annotations

import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy as np
import torch
import torch.distributed as dist

from megatron_longstraw.agreement import check_ranks_agree
from megatron_longstraw.algorithm import RLStep, StepReport
from megatron_longstraw.config import Config, ConfigError, parse_args
from megatron_longstraw.convert.adopt import check_window, open_folder, with_model_of
from megatron_longstraw.convert.folder import HFFolder
from megatron_longstraw.data.task import Task, check_prompts
from megatron_longstraw.disk import DiskError, problem_with, writing
from megatron_longstraw.interruption import Interrupted, StopRequest, end_with_torchrun
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.hf_weights import check_target, save_hf
from megatron_longstraw.mcore.optimizer import PolicyOptimizer
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.mcore.training_state import CheckpointError, Progress, TrainingState, find_start
from megatron_longstraw.metering import Meter
from megatron_longstraw.nonfinite import keep_step
from megatron_longstraw.objectives.metrics import MetricSums
from megatron_longstraw.planner.chunks import with_chunk_tokens
from megatron_longstraw.rewards.loading import RewardError, load_function, source_of
from megatron_longstraw.rollout.files import RolloutSaver
from megatron_longstraw.rollout.in_progress import FinishedGroups
from megatron_longstraw.rollout.scoring import Scorer
from megatron_longstraw.run_log import RunLog, check_sinks, peak_memory_bytes
from megatron_longstraw.sources import describe, task_maker, training_source, with_stop_ids
from megatron_longstraw.user_errors import lost_a_rank, report_lost_rank
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
        DiskError: on the rank that could not write into --run-dir; all have stopped as if asked to.
    """
    config = policy.config
    optimizer, progress = optimizer or PolicyOptimizer(policy), progress or Progress()
    scorer = save = None
    failures: list[DiskError] = []
    if config.data.rollout_file is None:
        scorer = Scorer(load_function(config.reward.reward_function), config.reward.reward_error_policy, task.render)
        path = log.folder / "rollouts.jsonl"
        if config.data.save_rollouts:
            save = _stopping(RolloutSaver(policy.layout, path, progress.steps), stop, failures)
    write_log = _stopping(log.step, stop, failures)
    finished = None if state is None or config.checkpoint.save is None else FinishedGroups(policy, config.checkpoint.save)
    rl_step = RLStep(policy, optimizer, scorer, save, finished, stop)
    # By step; -1: before the first, of a caller that trained the policy already.
    updates = Counter({-1: 0 if progress.steps else policy.weights_version})
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
            write_log(step, metrics, report.skipped)
            progress.steps = step + 1
            updates[step] = report.updates
            progress.nonfinite_in_a_row = progress.nonfinite_in_a_row + 1 if report.nonfinite else 0
            reason = _nonfinite_reason(config, step, progress.nonfinite_in_a_row)
            if reason is not None:
                kept = keep_step(policy, log.folder, step, groups, report.nonfinite, updates)
                raise TrainingStopped(f"{reason}; {kept}")
            if state is not None:
                state.after_step(progress)
            rl_step.stop_if_asked()
    except Interrupted:
        if state is not None:
            state.save_unless_saved(progress)
        for failure in failures:
            raise failure from None
        raise
    finally:
        watchdog.stop()
    if state is not None:
        state.finish_writing()
    calls = {name: (cost.seconds, cost.tokens) for name, cost in total.costs.items()}
    return RunSummary(rewards, calls, tokens_dense)


def _stopping(write: Callable[..., None], stop: StopRequest | None, failures: list[DiskError]) -> Callable[..., None]:
    """`write`, whose failure on one rank becomes a request to all of them to stop at the next safe point."""

    def attempt(*args) -> None:
        try:
            write(*args)
        except DiskError as error:
            if stop is None:
                raise
            failures.append(error)
            stop.received = stop.received or str(error)

    return attempt


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
    held = [meter.peaks.get(name, 0) for name in ("prefix/state_bytes", "prefix/host_bytes")]
    metrics["prefix/state_bytes"], host_bytes, peak_bytes = largest(policy, [*held, peak_memory_bytes()])
    if host_bytes:
        metrics["prefix/host_bytes"] = host_bytes
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


def _nonfinite_reason(config: Config, step: int, in_a_row: int) -> str | None:
    """Why training must not go on after a step, if so many up to it were not finite."""
    if in_a_row and config.run.nonfinite_policy == "stop":
        return f"step {step}: loss or gradient is not finite (--nonfinite-policy stop)"
    if in_a_row >= config.run.max_consecutive_nonfinite_steps:
        return (
            f"step {step}: loss or gradient was not finite {in_a_row} times in a row "
            f"(--max-consecutive-nonfinite-steps {config.run.max_consecutive_nonfinite_steps}); lower --lr"
        )
    return None


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
    end_with_torchrun()
    folder = open_folder(config)
    config = with_model_of(config, folder).resolve()
    check_window(config, folder)
    check_folders(config, folder)
    check_sinks(config)
    reward_function, make_task = load_function(config.reward.reward_function), task_maker(config)
    layout = parallel.initialize(config)
    config = with_chunk_tokens(config, dist.get_world_size())
    task = None if make_task is None else make_task(config)
    config = with_stop_ids(config, task)
    source = training_source(config, task)
    first = source.prompts(0, config.algorithm.train_batch_size)
    check_prompts(first, config.model.vocab_size, config.rollout)
    check_ranks_agree(config, first, [source_of(function) for function in (reward_function, make_task) if function])
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
            log.say(f"start      {note}")
        summary = train(policy, source, log, optimizer, state, progress, stop)
        if config.checkpoint.save_hf is not None:
            with writing(config.checkpoint.save_hf, "--save-hf"):
                notes = save_hf(policy.chunks, config.model, folder, config.checkpoint.save_hf)
            for note in notes:
                log.say(f"export     {note}")
            log.say(f"model      {config.checkpoint.save_hf}")
        print_summary(log, config, summary)
    finally:
        log.close()
    return summary


def check_folders(config: Config, folder: HFFolder | None) -> None:
    """Whether the folders that the run writes into can be written, as far as that can be known beforehand.

    Args:
        folder: that of --hf-checkpoint, if given, whose size is that of --save-hf.

    Raises:
        ConfigError, FolderError: one cannot.
    """
    checkpoint, problems = config.checkpoint, []
    if checkpoint.save is not None:
        problems.append(problem_with(checkpoint.save, "--save"))
    if os.environ.get("RANK", "0") == "0":  # the one that writes it
        problems.append(problem_with(config.run.run_dir, "--run-dir"))
    if checkpoint.save_hf is not None:
        check_target(Path(checkpoint.save_hf))
        need_bytes = 0 if folder is None else folder.files.num_bytes
        problems.append(problem_with(checkpoint.save_hf, "--save-hf", need_bytes))
    if any(problems):
        raise ConfigError(list(filter(None, problems)))


def exit_status(body: Callable[[], object]) -> int:
    """Run a program's body: 0 (also where it stopped on request), or 1 with one line on the screen for what a user can
    mend or another rank has to answer for (anything else is a bug and keeps its traceback). Leaves the process group
    either way."""
    try:
        body()
    except Interrupted as stop:
        if os.environ.get("RANK", "0") == "0":
            print(f"stopped: {stop}; the same command goes on from the checkpoint", flush=True)
    except (ValueError, FloatingPointError, RewardError, TrainingStopped, CheckpointError, DiskError) as error:
        report_error(error)
        return 1
    except RuntimeError as error:
        if not lost_a_rank(error):
            raise
        report_lost_rank(error)
        return 1
    finally:
        parallel.leave()
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: run(parse_args())))
