"""The plan of a run as text: what it would do on a number of ranks, without doing any of it."""
from __future__ import annotations

import dataclasses

from megatron_longstraw.config import Config
from megatron_longstraw.planner.bytes import RankBytes, bytes_of_rank, prefix_bytes, total_parameters

UNITS = {2**30: "GiB", 2**20: "MiB", 2**10: "KiB"}


def plan(config: Config, world_size: int) -> str:
    """The plan of a configuration that is valid for `world_size` ranks, a topic a line."""
    config = config.resolve()
    rows = [*_layout(config, world_size), *_tokens(config), *_bytes(config, world_size), *_timeouts(config, world_size)]
    return "\n".join(f"{name:<11}{text}".rstrip() for name, text in rows)


def group_sizes(config: Config, world_size: int) -> dict[str, int]:
    """Ranks of each process group that the run makes, by name."""
    parallel = config.parallel
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    return {
        "world": world_size,
        "tensor": tp,
        "context": cp,
        "pipeline": pp,
        "data": world_size // (tp * pp * cp),
        "expert": parallel.expert_model_parallel_size,
        "replica": tp * pp * cp,
    }


def _layout(config: Config, world_size: int):
    model, sizes = config.model, group_sizes(config, world_size)
    short = {"tp": "tensor", "cp": "context", "pp": "pipeline", "dp": "data", "ep": "expert"}
    layout = " x ".join(f"{name}{sizes[group]}" for name, group in short.items() if sizes[group] > 1) or "no split"
    layout += " + sp" if config.parallel.sequence_parallel else ""
    yield "layout", f"{layout} on {_count(world_size, 'rank')}"
    yield "model", (
        f"{total_parameters(model):,} parameters, {model.num_layers} layers, "
        f"{'bfloat16' if model.bf16 else 'float32'}; vocabulary {model.vocab_size:,}, "
        f"padded {model.padded_vocab_size(sizes['tensor']):,}"
    )
    yield "prefix", f"schedule {config.prefix.schedule}, gradient {config.prefix.prefix_grad}"


def _tokens(config: Config):
    rollout, prompts = config.rollout, config.algorithm.train_batch_size
    responses = prompts * rollout.group_size
    shape = f"{_count(prompts, 'prompt')} x {rollout.group_size} responses a step"
    response_tokens = f"{responses * rollout.max_response_length:,} of responses"
    longest = rollout.max_prompt_length
    if longest is None:
        yield "tokens", f"{shape}: prompts of any length (--max-prompt-length is unset), at most {response_tokens}"
        return
    cp, chunk = config.parallel.context_parallel_size, config.prefix.prefix_chunk_tokens
    yield "tokens", f"{shape}: at most {prompts * longest:,} of prompts and {response_tokens}"
    yield "", (
        f"longest prompt {longest:,} in {_count(-(-(longest - 1) // chunk), 'chunk')} of {chunk:,} "
        f"({-(-longest // cp):,} a rank), longest response {rollout.max_response_length:,}"
    )


def _bytes(config: Config, world_size: int):
    stages = range(config.parallel.pipeline_model_parallel_size)
    of_stages = [bytes_of_rank(config, world_size, stage) for stage in stages]
    stage = max(stages, key=lambda stage: of_stages[stage].total)
    yield "bytes", f"of the fullest rank{f' (pipeline stage {stage})' if len(stages) > 1 else ''}"
    for name, num_bytes, note in _items(config, of_stages[stage]):
        yield "", f"{name:<14}{num_bytes:>18,}{_rounded(num_bytes):>12}  {note}"
    if config.rollout.max_prompt_length is None:
        yield "", f"and {_bytes_per_prompt_token(config, world_size, stage):,} for each prompt token"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _rounded(num_bytes: int) -> str:
    size = next((size for size in UNITS if num_bytes >= size), None)
    return f"{num_bytes / size:.1f} {UNITS[size]}" if size else ""


def _items(config: Config, most: RankBytes):
    yield "weights", most.weights, ""
    yield "gradients", most.gradients, ""
    shared = ", shared by data x context ranks" if config.parallel.use_distributed_optimizer else ""
    yield "optimizer", most.optimizer, f"moments{' and master weights' if config.model.bf16 else ''}{shared}"
    times = f", {most.captures} captures held at once" if most.captures > 1 else ""
    yield "K, V", most.captures * most.prefix_kv, f"of prompts{times}"
    yield "out, lse", most.captures * most.prefix_attention, f"of prompts, kept for the walk back{times}"
    if most.prefix_graphs:
        yield "graphs", most.prefix_graphs, "of prompts' last chunks, at most"
    yield "dK, dV", most.prefix_grad, "of prompts"
    yield "sampling", most.sampling_kv, "K, V of responses; freed before dK, dV appear"
    yield "activations", most.activations, "estimate"
    yield "most at once", most.total, "without CUDA context, communication buffers and fragmentation"
    if most.host:
        yield "in host memory", most.host, f"K, V, dK, dV, out, lse that leave the device{times}"


def _bytes_per_prompt_token(config: Config, world_size: int, stage: int) -> int:
    """Of one capture on one rank, host memory included, in the middle of a long prompt."""
    tokens = config.prefix.prefix_chunk_tokens * config.parallel.context_parallel_size
    shorter, longer = (
        dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, max_prompt_length=1 + count * tokens))
        for count in (1, 2)
    )
    less, more = (sum(prefix_bytes(one, world_size, stage).values()) for one in (shorter, longer))
    return (more - less) // tokens


def _timeouts(config: Config, world_size: int):
    minutes = config.parallel.distributed_timeout_minutes
    groups = [f"{name} ({size})" for name, size in group_sizes(config, world_size).items() if size > 1]
    yield "timeouts", f"{minutes:g} minutes in every group: {', '.join(groups) or 'world (1)'}"
