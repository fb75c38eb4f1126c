"""What a run needs of a source of prompts."""
from __future__ import annotations

from typing import Protocol

import numpy as np

from megatron_longstraw.config import ConfigError, RolloutConfig
from megatron_longstraw.types import PromptGroup


class Task(Protocol):
    """A source of prompts and the text of their responses; `--prompt-function module:function` builds one from
    the run's configuration."""

    def prompts(self, step: int, num_prompts: int) -> list[PromptGroup]:
        """The prompts of a step, without branches; the same on every rank and after a resume."""

    def render(self, token_ids: np.ndarray) -> str:
        """Response ids as the text that the reward function sees."""


def check_prompts(groups: list[PromptGroup], vocab_size: int, rollout: RolloutConfig) -> None:
    """Raises:
    ConfigError: a prompt or response holds ids outside the vocabulary, or is longer than its limit; all at once.
    """
    problems = []
    for group in groups:
        problems += _id_problems(f"prompt of group {group.group_id!r}", group.prompt_ids, vocab_size)
        limit = rollout.max_prompt_length
        if limit is not None and group.num_prompt_tokens > limit:
            problems.append(
                f"prompt of group {group.group_id!r} has {group.num_prompt_tokens} tokens; the limit is {limit}: "
                f"shorten it or raise --max-prompt-length"
            )
        for index, branch in enumerate(group.branches):
            name = f"response {index} of group {group.group_id!r}"
            problems += _id_problems(name, branch.response_ids, vocab_size)
            if branch.num_tokens > rollout.max_response_length:
                problems.append(
                    f"{name} has {branch.num_tokens} tokens; the limit is {rollout.max_response_length}: "
                    f"shorten it or raise --max-response-length"
                )
    if problems:
        raise ConfigError(problems)


def _id_problems(name: str, ids: np.ndarray, vocab_size: int) -> list[str]:
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if not len(bad):
        return []
    return [
        f"{name} holds id {ids[bad[0]]} at position {bad[0]}; ids must be in 0..{vocab_size - 1}: "
        f"use the model's tokenizer or change --vocab-size"
    ]
