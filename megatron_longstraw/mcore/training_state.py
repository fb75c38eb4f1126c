"""Saving a run and going on with it: weights, optimizer, schedule, random numbers, and how far the run is.

Going on is exact at the same layout (every bit of what follows is that of a run without a stop) and possible at any
other. Prompts and sampled tokens are functions of the step, so the step's number is the whole data position.
"""
from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint import CheckpointException

from megatron_longstraw import random_states
from megatron_longstraw.config import CheckpointConfig, ConfigError, changed_settings, load_toml, to_toml
from megatron_longstraw.disk import cause, probe, writing
from megatron_longstraw.mcore import checkpoint_folder, cpu_runtime
from megatron_longstraw.mcore.checkpoint import model_state, newest, require_newest, state_metadata, together, write
from megatron_longstraw.mcore.checkpoint_folder import Checkpoint
from megatron_longstraw.mcore.optimizer import PolicyOptimizer, plain_parts
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.user_errors import lost_a_rank


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the ones before it are as they were."""


@dataclass
class Progress:
    """How far a run is."""

    steps: int = 0
    """RL steps done."""
    nonfinite_in_a_row: int = 0


@dataclass
class Start:
    """Where a run starts."""

    checkpoint: Checkpoint | None = None
    """None: with the weights of --hf-checkpoint, or random ones."""
    goes_on: bool = False
    """With optimizer and step, not only weights."""
    notes: list[str] = field(default_factory=list)
    """What to tell about it."""

    @property
    def steps(self) -> int:
        """RL steps done before."""
        return self.checkpoint.iteration if self.goes_on else 0


def find_start(options: CheckpointConfig) -> Start:
    """Where a run starts by --resume-mode, --save, --load and --finetune; a call of all ranks.

    Raises:
        ConfigError: no checkpoint where one has to be, or all are damaged.
    """
    saved, notes = newest(options.save) if options.save is not None else (None, [])
    if saved is not None and options.resume_mode == "auto":
        return Start(saved, True, notes)
    if saved is not None:
        raise ConfigError(
            [f"{options.save} holds checkpoints, and --resume-mode {options.resume_mode} would mix two runs; change --save"]
        )
    if options.load is None:
        return Start()
    found, notes = require_newest(options.load)
    if found.iteration is None and options.resume_mode == "resume_path":
        raise ConfigError([f"{found.path} holds converted weights only; need a trained checkpoint: change --load"])
    goes_on = found.iteration is not None and not options.finetune and options.resume_mode != "disable"
    return Start(found, goes_on, notes)


class TrainingState:
    """The checkpoints of one run, in a folder that is made here.

    Raises:
        DiskError: that is not possible.
    """

    def __init__(self, policy: Policy, optimizer: PolicyOptimizer):
        self.policy, self.optimizer = policy, optimizer
        self.options = policy.config.checkpoint
        self._queue = AsyncCallsQueue() if self.options.async_save else None
        self._saved_steps: int | None = None
        """Of the newest checkpoint, written or being written."""
        if self.options.save is not None:
            folder = Path(self.options.save)
            with writing(folder, "--save"):
                folder.mkdir(parents=True, exist_ok=True)
            if dist.get_rank() == 0:
                checkpoint_folder.sweep(folder)

    # -- going on --------------------------------------------------------------------------------------------

    def restore(self, start: Start) -> Progress:
        """Take everything but the weights, which the policy has already, from where the run starts; a call of all
        ranks. Lines about it are added to `start.notes`.

        Raises:
            ConfigError: the checkpoint is of another model.
        """
        if not start.goes_on:
            return Progress()
        path = start.checkpoint.path
        state = self.optimizer.state(model_state(self.policy.chunks), state_metadata(), loading=True)
        plain = plain_parts(state["optimizer"])
        try:
            with cpu_runtime.tensor_scope():
                loaded = dist_checkpointing.load(state, str(path))
        except (CheckpointingException, CheckpointException) as error:
            raise ConfigError([f"{path} does not fit this run: {_first_line(error)}; change --load"]) from error
        self.optimizer.load_state(loaded, plain)
        _set_random_state(loaded["random_states"], start.notes)
        start.notes.append(f"goes on after step {loaded['progress']['steps']} from {path}")
        changes = changed_settings(load_toml(loaded["config"]), self.policy.config)
        start.notes += [f"changed since then: {line}" for line in changes]
        self._saved_steps = loaded["progress"]["steps"]
        return Progress(**loaded["progress"])

    # -- saving ----------------------------------------------------------------------------------------------

    def after_step(self, progress: Progress) -> None:
        """Name what the background has written, and save if it is time for it; a call of all ranks."""
        if self.options.save is None:
            return
        if self._queue is not None and self._queue.get_num_unfinalized_calls():
            with _NamedFailure(Path(self.options.save), self._saved_steps):
                written = self._queue.maybe_finalize_async_calls(blocking=False)
            if written:
                self._prune()
        last = progress.steps == self.policy.config.run.train_iters
        if last or (self.options.save_interval is not None and progress.steps % self.options.save_interval == 0):
            self.save(progress)

    def save_unless_saved(self, progress: Progress) -> None:
        """Save now, wherever --save asks for checkpoints, and wait for it; a call of all ranks."""
        if self.options.save is not None and self._saved_steps != progress.steps:
            self.save(progress)
        self.finish_writing()

    def save(self, progress: Progress) -> None:
        """Write a checkpoint; a call of all ranks. In the background with --async-save, one at a time.

        Raises:
            CheckpointError: the folder is gone, full or not to be written; what was saved before is as it was.
        """
        self.finish_writing()
        self._saved_steps = progress.steps
        folder, steps = Path(self.options.save), progress.steps
        model = model_state(self.policy.chunks)
        state = {
            "checkpoint_version": 3.0,
            "iteration": steps,
            "progress": vars(progress).copy(),
            "config": to_toml(self.policy.config),
            "random_states": _random_states(),
            **model,
            **self.optimizer.state(model, state_metadata(), loading=False),
        }
        with _NamedFailure(folder, steps):
            request = write(state, folder, steps, {"steps": steps}, in_background=self._queue is not None)
        if request is None:
            self._prune()
        else:
            self._queue.schedule_async_request(request)

    def finish_writing(self) -> None:
        """Wait for the background; a call of all ranks."""
        if self._queue is not None and self._queue.get_num_unfinalized_calls():
            with _NamedFailure(Path(self.options.save), self._saved_steps):
                self._queue.maybe_finalize_async_calls(blocking=True)
            self._prune()

    def _prune(self) -> None:
        folder, options = Path(self.options.save), self.options
        with writing(folder, "--save"):
            together(lambda: checkpoint_folder.prune(folder, options.max_ckpt_to_keep, options.save_retain_interval))


class _NamedFailure:
    """Turns what file systems and Megatron's writers raise into one clear error, and leaves no half checkpoint."""

    def __init__(self, folder: Path, steps: int):
        self.folder, self.steps = folder, steps

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        reason = None if error is None else self._reason(error)
        if reason is None:
            return False
        if dist.get_rank() == 0:  # what is left would take the room that is to be made
            shutil.rmtree(checkpoint_folder.partial_path(self.folder, self.steps), ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {self.steps} cannot be written to {self.folder}: {reason}; earlier ones are as "
            f"they were. Make room or change --save, and start again: the run goes on from the newest"
        ) from error

    def _reason(self, error: BaseException) -> str | None:
        """None: the error is of another kind."""
        try:
            probe(self.folder)  # torch's own writers do not repeat what the system says
            system = ""
        except OSError as failure:
            system = cause(failure)
        if isinstance(error, (OSError, CheckpointException, CheckpointingException)):
            said = _first_line(error)
            return said if not system or system.partition(" (")[0] in said else f"{system}; {said}"
        writer_failed = isinstance(error, RuntimeError) and not lost_a_rank(error)
        return system if writer_failed and system else None


def _first_line(error: BaseException) -> str:
    """The cause that a chain of wrapped errors began with."""
    if isinstance(error, CheckpointException):
        error = next(iter(failure[0] for failure in error.failures.values()), error)
    text = str(error).strip().splitlines()
    return text[-1] if text else type(error).__name__


def _random_states() -> list[dict[str, Any]]:
    """By rank."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, random_states.get_states())
    return states


def _set_random_state(states: list[dict[str, Any]], notes: list[str]) -> None:
    if len(states) != dist.get_world_size():
        notes.append(f"saved by {len(states)} ranks, so the global random states of reward functions start anew")
        return
    random_states.set_states(states[dist.get_rank()])
