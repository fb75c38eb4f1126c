"""What is kept of a step when training stops because it was not finite, to look at and to run again.

    RUN_DIR/nonfinite_step_000012/
      rollouts.jsonl   the step's groups of all ranks as --rollout-file reads them (there they are step 0)
      config.toml      the run's configuration, changed to one step on them with the newest checkpoint's weights
      report.json      which gradients, token weights and log-probs were not finite, and how old the weights are
      replay.sh        the command that runs the step again
"""
from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections import Counter
from pathlib import Path

import torch.distributed as dist

from megatron_longstraw.algorithm import NonFinite
from megatron_longstraw.config import Config, to_toml
from megatron_longstraw.data.rollout_files import RolloutWriter
from megatron_longstraw.mcore.checkpoint_folder import Checkpoint, candidates
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.rollout.files import gather_groups
from megatron_longstraw.types import PromptGroup


def keep_step(
    policy: Policy, run_dir: Path, step: int, groups: list[PromptGroup], found: NonFinite, updates: Counter[int]
) -> str:
    """Write the folder of a step; a call of all ranks. A folder of the same step is written over.

    Args:
        groups: the global batch, of which this rank's groups have their responses.
        updates: how often the weights moved, by step.

    Returns: for the message, where it is, or why it could not be written (alike on all ranks).
    """
    parts: list[NonFinite | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    everyone = {
        name: list(dict.fromkeys(text for part in parts for text in getattr(part, name)))
        for name in ("gradients", "tables")
    }
    whole = gather_groups(policy.layout, groups) if policy.layout.is_cell_leader else groups
    folder, outcome = run_dir / f"nonfinite_step_{step:06d}", [""]
    if dist.get_rank() == 0:
        try:
            checkpoint = newest_checkpoint(policy.config)
            facts = {
                "step": step,
                "update": found.update,
                **everyone,
                "checkpoint": None if checkpoint is None else str(checkpoint.path.absolute()),
                "updates_since_checkpoint": updates_since(checkpoint, policy.config, updates),
            }
            _write(folder, whole, replay_config(policy.config, folder.absolute(), checkpoint), facts)
            outcome = [f"the step is kept in {folder}, and bash {folder / 'replay.sh'} runs it again"]
        except (OSError, ValueError) as error:
            outcome = [f"the step could not be kept in {folder}: {error}"]
    dist.broadcast_object_list(outcome, src=0)
    return outcome[0]


def newest_checkpoint(config: Config) -> Checkpoint | None:
    """That a run with this configuration has saved last, or else began with; None: there is none."""
    folders = (config.checkpoint.save, config.checkpoint.load)
    return next((checkpoint for folder in folders if folder for checkpoint in candidates(folder)[:1]), None)


def updates_since(checkpoint: Checkpoint | None, config: Config, updates: Counter[int]) -> int:
    """How often the weights moved since the checkpoint, or, where nothing was saved, since the run began."""
    saved = checkpoint is not None and config.checkpoint.save and checkpoint.path.parent == Path(config.checkpoint.save)
    return sum(number for step, number in updates.items() if not saved or step >= checkpoint.iteration)


def replay_config(config: Config, folder: Path, checkpoint: Checkpoint | None) -> Config:
    """The configuration that trains one step on the rollouts of the folder and writes nothing but a run folder."""
    checkpoints = dataclasses.replace(
        config.checkpoint,
        load=None if checkpoint is None else str(checkpoint.path.parent.absolute()),
        finetune=checkpoint is not None and checkpoint.iteration is not None,
        resume_mode="auto",
        save=None,
        save_interval=None,
        async_save=False,
        max_ckpt_to_keep=None,
        save_retain_interval=None,
        save_hf=None,
    )
    run = dataclasses.replace(
        config.run, train_iters=1, prompt_function=None, run_dir=str(folder / "replay"), nonfinite_policy="stop"
    )
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, train_files=(), rollout_file=str(folder / "rollouts.jsonl")),
        checkpoint=checkpoints,
        # A decay that follows from train_iters keeps its length.
        optimizer=dataclasses.replace(
            config.optimizer, lr_decay_iters=config.optimizer.lr_decay_iters or config.run.train_iters
        ),
        run=run,
        logging=dataclasses.replace(config.logging, wandb_project=None, wandb_exp_name=None, wandb_save_dir=None),
    )


def _write(folder: Path, groups: list[PromptGroup], config: Config, facts: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    (folder / "replay.sh").write_text(_script(folder.absolute(), facts), encoding="utf-8")
    RolloutWriter(folder / "rollouts.jsonl").write(0, groups)


def _script(folder: Path, facts: dict) -> str:
    weights = facts["checkpoint"] or "those that the configuration begins with"
    updates = f"the run made {facts['updates_since_checkpoint']} updates since"
    notes = [f"Runs step {facts['step']} again. Weights: {weights}; {updates}."]
    world_size = dist.get_world_size()
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    num_nodes = world_size // ranks_here
    command = [sys.executable]
    if world_size > 1:
        where = "--standalone" if num_nodes == 1 else f"--nnodes={num_nodes}"
        command += ["-m", "megatron_longstraw.agent", where, f"--nproc-per-node={ranks_here}"]
    if num_nodes > 1:
        notes.append(f"For each of {num_nodes} nodes, with --rdzv-backend c10d and --rdzv-endpoint HOST:PORT.")
    command += ["-m", "megatron_longstraw.train", "--config", str(folder / "config.toml")]
    if "PYTHONPATH" in os.environ:
        command = ["env", f"PYTHONPATH={os.environ['PYTHONPATH']}", *command]
    lines = ["#!/usr/bin/env bash", *(f"# {note}" for note in notes)]
    return "\n".join([*lines, f"cd {shlex.quote(os.getcwd())} && {shlex.join(command)}", ""])
