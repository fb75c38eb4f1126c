"""Where a run's groups come from: prompts of files or of a user's function, or the rollouts of a file."""
from __future__ import annotations

import dataclasses
from typing import Callable

from megatron_longstraw.config import Config, ConfigError
from megatron_longstraw.data.file_task import FileTask
from megatron_longstraw.data.task import Task
from megatron_longstraw.rewards.loading import load_function
from megatron_longstraw.rollout.files import open_rollouts


def task_maker(config: Config) -> Callable[[Config], Task] | None:
    """What builds the prompts of a configuration; None where only --rollout-file is given.

    Raises:
        ConfigError: there is no source, or there are two.
    """
    function, files = config.run.prompt_function, config.data.train_files
    if function and files:
        raise ConfigError([f"got --train-files {' '.join(files)} and --prompt-function {function}; need one of them"])
    if files:
        return FileTask.from_config
    if function:
        return load_function(function, "--prompt-function")
    if config.data.rollout_file is None:
        raise ConfigError(
            ["no prompts; name --train-files, a source with --prompt-function module:function, or --rollout-file"]
        )
    return None


def training_source(config: Config, task: Task | None) -> Task:
    """The groups to train on: prompts to sample responses to, or those of --rollout-file; then prompts, if there are
    any, are what theirs must equal.

    Raises:
        RowError: see `open_rollouts`.
    """
    return task if config.data.rollout_file is None else open_rollouts(config, task)


def with_stop_ids(config: Config, task: Task | None) -> Config:
    """Responses to prompts of files end at the ids that the model folder names (generation_config.json), else at the
    tokenizer's end-of-text ids, unless --stop-token-ids says otherwise.

    Raises:
        ConfigError: the tokenizer names none.
    """
    if "stop_token_ids" in config.given or config.rollout.stop_token_ids or not isinstance(task, FileTask):
        return config
    stop_ids = task.tokenizer.eos_token_ids
    if not stop_ids:
        raise ConfigError([
            "the tokenizer names no end-of-text token, so every response would run to --max-response-length; need "
            "--stop-token-ids (without a value if that is wanted)"
        ])  # fmt: skip
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, stop_token_ids=stop_ids))


def describe(source: Task) -> str:
    """One line about a source."""
    own = getattr(source, "describe", None)
    return own() if own is not None else type(source).__name__
