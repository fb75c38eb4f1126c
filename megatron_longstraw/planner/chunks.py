"""How long a prompt chunk may be, from the bytes that its activations may take."""
from __future__ import annotations

import dataclasses
from typing import Iterator

from megatron_longstraw.config import SETTINGS, Config, ConfigError, check
from megatron_longstraw.planner.bytes import activation_bytes

SMALLEST_TOKENS = 128
LEAST_CHUNKS = 16
"""Of the longest prompt under context parallelism, where the ranks that hold a chunk's last slices attend to more of it
than the others: a sixteenth of the prompt is little beside what comes before."""


def with_chunk_tokens(config: Config, world_size: int) -> Config:
    """The configuration with the largest `prefix_chunk_tokens` that its `prefix_activation_bytes` allow, in place of
    these: a power of two, rounded up to what the ranks of a chunk can share evenly. Itself where it has no such bytes.

    Raises:
        ConfigError: not even the smallest chunk fits, or another setting does not go with the chosen one.
    """
    budget = config.prefix.prefix_activation_bytes
    if budget is None:
        return config
    candidates = [_with_tokens(config, tokens) for tokens in _candidates(config)]
    needed = [_most_bytes(candidate, world_size) for candidate in candidates]
    fitting = [candidate for candidate, num_bytes in zip(candidates, needed) if num_bytes <= budget]
    if not fitting:
        names = ("prefix_activation_bytes", "context_parallel_size", "branches_per_microbatch")
        raise ConfigError([
            f"got prefix_activation_bytes {budget}, need at least {needed[0]}, for chunks of "
            f"{candidates[0].prefix.prefix_chunk_tokens} tokens; change {' or '.join(SETTINGS[name].flag for name in names)}"
        ])  # fmt: skip
    check(fitting[-1], world_size)
    return fitting[-1]


def _candidates(config: Config) -> Iterator[int]:
    """Chunk sizes from the smallest to one that holds a longest prompt, or while prompts stay in many chunks."""
    unit = config.parallel.context_parallel_size
    unit *= config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    longest = (config.rollout.max_prompt_length or config.model.max_position_embeddings) - 1
    tokens = SMALLEST_TOKENS
    while True:
        yield -(-tokens // unit) * unit
        tokens *= 2
        few = config.parallel.context_parallel_size > 1 and -(-longest // tokens) < LEAST_CHUNKS
        if few or tokens >= 2 * longest:
            return


def _with_tokens(config: Config, tokens: int) -> Config:
    prefix = dataclasses.replace(config.prefix, prefix_chunk_tokens=tokens, prefix_activation_bytes=None)
    return dataclasses.replace(config, prefix=prefix)


def _most_bytes(config: Config, world_size: int) -> int:
    stages = range(config.parallel.pipeline_model_parallel_size)
    return max(activation_bytes(config.resolve(), world_size, stage) for stage in stages)
