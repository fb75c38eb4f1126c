"""Runs that stop and go on, as functions for one or several ranks."""
from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from megatron_longstraw.algorithm import RLStep
from megatron_longstraw.config import load_config
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.optimizer import PolicyOptimizer
from megatron_longstraw.mcore.parameters import named_shards
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.mcore.training_state import TrainingState, find_start
from megatron_longstraw.rollout.scoring import Scorer
from tests.helpers import TINY, random_groups

LENGTHS = [40, 25]


def score(data_source, solution_str, ground_truth, extra_info):
    return solution_str.count("a") + 0.1 * solution_str.count("b")


def noisy_score(data_source, solution_str, ground_truth, extra_info):
    """Draws from a global generator, as user code may."""
    return score(data_source, solution_str, ground_truth, extra_info) + torch.rand(()).item()


def train(rank: int, steps: int, options: dict, reward=noisy_score) -> dict:
    """Run until `steps` RL steps are done, going on from --save, and save there; the state after it."""
    options = TINY | dict(lr_warmup_iters=2, lr_decay_style="linear", train_iters=6, min_lr=0.0) | options
    config = load_config(overrides=options).resolve()
    layout = parallel.initialize(config)
    start = find_start(config.checkpoint)
    seed_generators(7 + rank)
    policy = Policy(config, layout, checkpoint=start.checkpoint)
    optimizer = PolicyOptimizer(policy)
    state = TrainingState(policy, optimizer)
    progress = state.restore(start)
    rl_step = RLStep(policy, optimizer, Scorer(reward, "fail", lambda ids: "".join(chr(97 + token % 26) for token in ids)))
    history = []
    while progress.steps < steps:
        groups = random_groups(2, LENGTHS, [], seed=progress.steps)
        metrics = rl_step.run(progress.steps, groups).metrics.to_means()
        row = {name: metrics[name] for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "actor/lr")}
        history.append(row | {"random_states": random_states(), "schedule_steps": optimizer.schedule.num_steps})
        progress.steps += 1
    if config.checkpoint.save is not None:
        state.save(progress)
        state.finish_writing()
    return {"history": history, "weights": fingerprints(policy), "notes": start.notes, "steps": progress.steps}


def seed_generators(seed: int) -> None:
    for seed_one in (random.seed, np.random.seed, torch.manual_seed):
        seed_one(seed)


def random_states() -> str:
    """Hash of Python's, NumPy's and torch's global generators."""
    states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    return hashlib.sha256(repr(states).encode()).hexdigest()


def fingerprints(policy: Policy) -> dict[tuple, str]:
    """Hash of every local parameter's bits."""
    return {
        shard.key: hashlib.sha256(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for shard, parameter in named_shards(policy.chunks, policy.config.model)
    }
