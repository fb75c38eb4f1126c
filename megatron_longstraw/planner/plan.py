"""The plan of a run as text: what it would do on a number of ranks, without doing any of it."""
from __future__ import annotations

from typing import Iterable, Iterator

from megatron_longstraw.config import Config
from megatron_longstraw.planner.bytes import RankBytes, fullest_stage, prefix_bytes
from megatron_longstraw.planner.parameters import total_parameters
from megatron_longstraw.planner.shape import Shape, shape_of
from megatron_longstraw.planner.tape import ACTIVATIONS, COMMUNICATION, LOGITS, PREFIX_GRADIENTS, WEIGHT_GRADIENTS
from megatron_longstraw.planner.working import SAMPLING

UNITS = {2**30: "GiB", 2**20: "MiB", 2**10: "KiB"}


def plan(config: Config, world_size: int) -> str:
    """The plan of a configuration that is valid for `world_size` ranks, a topic a line."""
    return plan_of_shape(shape_of(config, world_size))


def plan_of_shape(shape: Shape) -> str:
    config, world_size = shape.config, shape.world_size
    rows = [*_layout(shape), *_tokens(config), *_bytes(shape), *_timeouts(config, world_size)]
    return lines(rows)


def lines(rows: Iterable[tuple[str, str]]) -> str:
    """(topic, text) as lines; a line without a topic goes on with the one above."""
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


def layout_name(shape: Shape) -> str:
    sizes = group_sizes(shape.config, shape.world_size)
    short = {"tp": "tensor", "cp": "context", "pp": "pipeline", "dp": "data", "ep": "expert"}
    layout = " x ".join(f"{name}{sizes[group]}" for name, group in short.items() if sizes[group] > 1) or "no split"
    return layout + " + sp" * shape.sp


def _layout(shape: Shape) -> Iterator[tuple[str, str]]:
    config, model = shape.config, shape.model
    yield "layout", f"{layout_name(shape)} on {_count(shape.world_size, 'rank')}"
    yield "model", (
        f"{total_parameters(model, shape.linear):,} parameters, {model.num_layers} layers, "
        f"{'bfloat16' if model.bf16 else 'float32'}; vocabulary {model.vocab_size:,}, "
        f"padded {model.padded_vocab_size(shape.tp):,}"
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


def _bytes(shape: Shape) -> Iterator[tuple[str, str]]:
    stage, most = fullest_stage(shape)
    yield "bytes", f"of the fullest rank{f' (pipeline stage {stage})' if shape.pp > 1 else ''}"
    for name, num_bytes, note in items(shape, most):
        yield "", f"{name:<18}{num_bytes:>18,}{rounded(num_bytes):>12}  {note}"
    if shape.config.rollout.max_prompt_length is None:
        yield "", f"and {_bytes_per_prompt_token(shape):,} for each prompt token"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def rounded(num_bytes: int) -> str:
    size = next((size for size in UNITS if num_bytes >= size), None)
    return f"{num_bytes / size:.1f} {UNITS[size]}" if size else ""


def items(shape: Shape, most: RankBytes) -> Iterator[tuple[str, int, str]]:
    """(what, bytes, note): all that is stored, then what is alive beside it when most is."""
    config = shape.config
    yield "weights", most.weights, ""
    if shape.adapter_rank is not None:
        yield "adapters", most.adapters, f"of rank {shape.adapter_rank}, on {_SCOPES[shape.adapter_scope]}"
    yield "gradients", most.gradients, ""
    shared = ", shared by data x context ranks" if config.parallel.use_distributed_optimizer else ""
    yield "optimizer", most.optimizer, f"moments{' and master weights' if config.model.bf16 else ''}{shared}"
    times = f", {most.captures} captures held at once" if most.captures > 1 else ""
    yield "K, V", most.captures * most.prefix_kv, f"of prompts{times}"
    if most.prefix_boundaries:
        yield "boundary states", most.captures * most.prefix_boundaries, f"of linear attention{times}"
    yield "out, lse", most.captures * most.prefix_attention, f"of prompts, kept for the walk back{times}"
    if most.prefix_graphs:
        yield "graphs", most.prefix_graphs, "of prompts' last chunks, at most"
    yield PREFIX_GRADIENTS, most.prefix_grad, "of prompts"
    yield SAMPLING, most.sampling_kv, "K, V of responses; freed before dK, dV appear"
    alive = most.fullest.kinds
    for kind, note in _WORKING.items():
        yield kind, int(alive[kind]), note
    yield "most at once", most.total, f"in {most.fullest.name}; without CUDA context, NCCL's buffers and fragmentation"
    if most.host:
        yield "in host memory", most.host, f"what leaves the device{times}"


_SCOPES = {"all": "every token", "responses": "responses only"}
_WORKING = {
    ACTIVATIONS: "of the fullest micro-batch",
    COMMUNICATION: "rows gathered from other ranks",
    LOGITS: "of log_probs_chunk_size response rows",
    WEIGHT_GRADIENTS: "of single matrices, on their way into the gradients",
}


def _bytes_per_prompt_token(shape: Shape) -> int:
    """Of one capture on one rank, host memory included, in the middle of a long prompt."""
    tokens = shape.config.prefix.prefix_chunk_tokens * shape.cp
    stage = fullest_stage(shape)[0]
    shorter, longer = (prefix_bytes(shape.changed(max_prompt_length=1 + count * tokens), stage) for count in (1, 2))
    return (sum(longer.values()) - sum(shorter.values())) // tokens


def _timeouts(config: Config, world_size: int):
    minutes = config.parallel.distributed_timeout_minutes
    groups = [f"{name} ({size})" for name, size in group_sizes(config, world_size).items() if size > 1]
    yield "timeouts", f"{minutes:g} minutes in every group: {', '.join(groups) or 'world (1)'}"
