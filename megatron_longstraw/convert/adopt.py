"""A run's configuration with the model of a Hugging Face folder in it."""
from __future__ import annotations

import dataclasses

from megatron_longstraw.config import SETTINGS, Config, ConfigError
from megatron_longstraw.convert.folder import HFFolder
from megatron_longstraw.convert.rope import SETTINGS as ROPE_SETTINGS

_FREE = {*ROPE_SETTINGS, "init_method_std"}
"""What a run may set otherwise than the folder says."""


def open_folder(config: Config) -> HFFolder | None:
    """The folder that --hf-checkpoint names.

    Raises:
        FolderError: it cannot be used.
    """
    if config.checkpoint.hf_checkpoint is None:
        return None
    return HFFolder(config.checkpoint.hf_checkpoint, backfill=config.checkpoint.backfill)


def with_model_of(config: Config, folder: HFFolder | None) -> Config:
    """The configuration with the folder's model, and with its end-of-sequence ids where none are set.

    What was set explicitly stays where it may (rotary settings, to lengthen the context) and must agree elsewhere.

    Raises:
        ConfigError: a setting contradicts the folder; all at once.
    """
    if folder is None:
        return config
    problems, settings = [], {}
    for name, value in folder.settings.items():
        given = getattr(config.model, name)
        if name not in config.given:
            settings[name] = value
        elif given != value and name not in _FREE:
            flag = SETTINGS[name].flag
            problems.append(f"got {name} {given}; {folder.path} has {value}: leave {flag} out or change --hf-checkpoint")
    if "rotary_base" not in folder.settings and "rotary_base" not in config.given:
        problems.append(
            f"{folder.path}/config.json names no rope_theta, and a guess would be silently wrong; say it with "
            f"--rotary-base (10000 for Llama 2)"
        )
    model = dataclasses.replace(config.model, **settings)
    rollout = config.rollout
    if folder.window_tokens is not None:
        longest = None if rollout.max_prompt_length is None else rollout.max_prompt_length + rollout.max_response_length
        if longest is None or longest > folder.window_tokens:
            got = "prompts of any length" if longest is None else f"a longest prompt plus response of {longest} tokens"
            problems.append(
                f"got {got}; {folder.path} attends to a window of {folder.window_tokens} tokens, and windows are not "
                f"built: need prompt plus response within it; change --max-prompt-length or --max-response-length"
            )
    if "stop_token_ids" not in config.given:
        rollout = dataclasses.replace(rollout, stop_token_ids=folder.eos_token_ids)
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(config, model=model, rollout=rollout)
