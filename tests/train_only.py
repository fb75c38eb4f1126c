"""A sampling run and a run on its rollout file, for tests of one and of several ranks."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_longstraw.config import load_config
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.run_log import RunLog
from megatron_longstraw.sources import training_source
from megatron_longstraw.train import train
from megatron_longstraw.types import PromptGroup
from tests.helpers import TINY, weights

STEPS = 3
OPTIONS = TINY | dict(
    train_iters=STEPS,
    train_batch_size=3,
    stop_token_ids=tuple(range(0, 60, 7)),
    reward_function=f"{__name__}:reward",
    prompt_function=f"{__name__}:task",
)


class Prompts:
    """Prompts of three lengths, so that they are batched in another order than they come in."""

    def prompts(self, step: int, num_prompts: int) -> list[PromptGroup]:
        rng = np.random.default_rng(step)
        lengths = [(33, 20, 33)[number % 3] for number in range(num_prompts)]
        return [PromptGroup(rng.integers(0, 60, n), group_id=f"{step}-{i}") for i, n in enumerate(lengths)]

    def render(self, token_ids: np.ndarray) -> str:
        return " ".join(map(str, token_ids))

OF_THE_MACHINE = ("timing_s/", "perf/", "prefix/state_bytes")
"""Metrics of what it cost: a sampling run holds all states at once, a train-only run one after the other."""


def task(config) -> Prompts:
    return Prompts()


def reward(data_source, solution_str, ground_truth, extra_info):
    ids = list(map(int, solution_str.split()))
    return {"score": None if sum(ids) % 11 == 0 else (sum(ids) % 7) / 7.0, "even": float(len(ids) % 2 == 0)}


def run(folder: Path, with_prompts: bool = True, **options) -> tuple[dict[tuple, torch.Tensor], list[dict]]:
    """Weights at the end, and the metrics of each step without what depends on the clock."""
    config = load_config(overrides=OPTIONS | {"run_dir": str(folder)} | options).resolve()
    layout = parallel.initialize(config)
    source = training_source(config, task(config) if with_prompts else None)
    policy = Policy(config, layout)
    log = RunLog(config, active=dist.get_rank() == 0)
    train(policy, source, log)
    log.close()
    metrics = []
    if log.active:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        metrics = [{key: value for key, value in line.items() if not key.startswith(OF_THE_MACHINE)} for line in lines]
    return weights(policy), metrics


def sampled_and_trained_again(folder: Path, **options) -> list[tuple[dict[tuple, torch.Tensor], list[dict]]]:
    """What a sampling run and one on its rollout file end with."""
    first = run(folder / "sampled", **options)
    if dist.get_rank() == 0:
        assert len((folder / "sampled" / "rollouts.jsonl").read_bytes().splitlines()) == STEPS * 3 * TINY["group_size"]
    dist.barrier()
    options |= {"rollout_file": str(folder / "sampled" / "rollouts.jsonl"), "prompt_function": None}
    return [first, run(folder / "again", with_prompts=False, **options)]


def same_bits(one: dict[tuple, torch.Tensor], other: dict[tuple, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
