"""What fits, how far it goes, and which choice takes it further."""
from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Callable, Iterator

from megatron_longstraw.config import validate
from megatron_longstraw.planner.bytes import fullest_stage
from megatron_longstraw.planner.hardware import Hardware
from megatron_longstraw.planner.seconds import step_seconds
from megatron_longstraw.planner.shape import Shape

MOST_TOKENS = 2**30
GRAIN_TOKENS = 1024
WORLD_SIZES = (*(2**n for n in range(4)), *range(16, 65, 8), *(2**n for n in range(7, 13)))


def fits(shape: Shape, hardware: Hardware) -> bool:
    _, needed = fullest_stage(shape)
    return needed.total <= hardware.usable_bytes and needed.host <= hardware.host_bytes


def longest_context(shape: Shape, hardware: Hardware) -> int:
    """Most positions (prompt and response) that fit, in steps of GRAIN_TOKENS; 0 where not even the shortest does."""
    response = shape.config.rollout.max_response_length

    def possible(grains: int) -> bool:
        prompt = grains * GRAIN_TOKENS - response
        return prompt < 1 or fits(shape.changed(max_prompt_length=prompt), hardware)

    if not fits(shape.changed(max_prompt_length=1), hardware):
        return 0
    return _largest(possible, MOST_TOKENS // GRAIN_TOKENS) * GRAIN_TOKENS


def largest_group(shape: Shape, hardware: Hardware) -> int:
    return _largest(lambda size: fits(shape.changed(group_size=size), hardware), 2**16)


def _largest(possible: Callable[[int], bool], most: int) -> int:
    """Largest number up to `most` that is possible, 0 if 1 is not; what is possible stays so further down."""
    low, high = 0, 1
    while high <= most and possible(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return min(low, most)


# -- one choice at a time ------------------------------------------------------------------------------------


def choices(shape: Shape) -> Iterator[tuple[str, Shape]]:
    """Every single change that may save memory, as a flag and the shape with it."""
    config = shape.config
    numbers = {
        "prefix_chunk_tokens": max(GRAIN_TOKENS, config.prefix.prefix_chunk_tokens // 2),
        "branches_per_microbatch": max(1, config.prefix.branches_per_microbatch // 2),
        "log_probs_chunk_size": max(128, config.prefix.log_probs_chunk_size // 2),
        "prefix_state_budget": 0,
        "tensor_model_parallel_size": 2 * shape.tp,
        "pipeline_model_parallel_size": 2 * shape.pp,
        "context_parallel_size": 2 * shape.cp,
        "expert_model_parallel_size": 2 * shape.ep,
    }
    for name, value in numbers.items():
        yield f"{_flag(name)} {value}", shape.changed(**{name: value})
    for name, value in (("prefix_grad", "frozen"), ("recompute_granularity", "full")):
        yield f"{_flag(name)} {value}", shape.changed(**{name: value})
    yield "--use-distributed-optimizer", shape.changed(use_distributed_optimizer=True)
    yield "--sequence-parallel", shape.changed(sequence_parallel=True)
    for value in ("host", "none"):
        yield f"--prefix-out-tier {value}", shape.changed(out_tier=value)
    yield "--prefix-kv-dtype fp8", shape.changed(kv_dtype="fp8")
    yield "--prefix-grad-dtype bf16", shape.changed(kv_grad_dtype="bf16")
    yield "--prefix-kv-tier host", shape.changed(kv_tier="host")
    if shape.model.bf16:
        offload = shape.changed(optimizer_cpu_offload=True, use_distributed_optimizer=True)
        yield "--optimizer-cpu-offload --use-distributed-optimizer", offload
    # Ranks may leave one kind of parallelism for another.
    for name, other in itertools.permutations(("tensor_model_parallel_size", "context_parallel_size"), 2):
        sizes = {name: 2 * getattr(config.parallel, name), other: getattr(config.parallel, other) // 2}
        if sizes[other]:
            yield " ".join(f"{_flag(key)} {size}" for key, size in sizes.items()), shape.changed(**sizes)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def gains(shape: Shape, hardware: Hardware) -> list[tuple[str, int]]:
    """(choice, tokens of longest context it adds), the most first; choices that are not valid or add none left out."""
    shape = unbounded(shape)
    now = longest_context(shape, hardware)
    found = []
    for name, changed in choices(shape):
        if changed != shape and not validate(changed.config, changed.world_size):
            found.append((name, longest_context(changed, hardware) - now))
    return sorted((gain for gain in found if gain[1] > 0), key=lambda gain: -gain[1])


def unbounded(shape: Shape) -> Shape:
    """Positions beyond the model's are a question of its rotary embedding, not of memory."""
    return shape.changed(max_position_embeddings=MOST_TOKENS + 2**20)


# -- layouts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    shape: Shape
    num_bytes: int
    seconds: float
    fits: bool
    changes_numbers: bool
    """It rounds where the model does not."""

    @property
    def rank(self) -> tuple:
        return not self.fits, self.changes_numbers, self.seconds if self.fits else self.num_bytes


def best_layouts(shape: Shape, hardware: Hardware) -> list[Candidate]:
    """Valid layouts with the tiers and dtypes that suit each best, best first: those that fit by their seconds."""
    shape = unbounded(shape)
    found = [_best_storage(candidate, hardware) for candidate in layouts(shape)]
    return sorted(found, key=lambda candidate: candidate.rank)


def all_context_parallel(shape: Shape, hardware: Hardware) -> Candidate:
    """All ranks share the tokens, none the weights."""
    return _best_storage(_layout(unbounded(shape), 1, 1, shape.world_size, 1), hardware)


def layouts(shape: Shape) -> Iterator[Shape]:
    """Sizes are powers of two, and ranks of one replica share whatever data parallelism leaves."""
    world = shape.world_size
    sizes = [2**n for n in range(world.bit_length()) if world % 2**n == 0] + ([world] if world & (world - 1) else [])
    experts = sizes if shape.model.num_experts is not None else [1]
    for tp, pp, cp, ep in itertools.product(sizes, sizes, sizes, experts):
        if world % (tp * pp * cp) or tp > 8 or shape.config.algorithm.ppo_mini_batch_size < world // (tp * pp * cp):
            continue
        candidate = _layout(shape, tp, pp, cp, ep)
        if not validate(candidate.config, world):
            yield candidate


def _layout(shape: Shape, tp: int, pp: int, cp: int, ep: int) -> Shape:
    return shape.changed(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        num_virtual_stages_per_pipeline_rank=None,
        sequence_parallel=tp > 1,
        use_distributed_optimizer=shape.world_size > tp * pp or shape.optimizer_cpu_offload,
    )


def _best_storage(shape: Shape, hardware: Hardware) -> Candidate:
    """The fastest way of keeping the prefix state that fits, of those that leave numbers as they are if one does."""
    shared = shape.model.bf16 and shape.config.parallel.use_distributed_optimizer
    tiers = itertools.product(("device", "host", "none"), ("device", "host"), (False, True) if shared else (False,))
    dtypes = ((None, "fp32"), (None, "bf16"), ("fp8", "bf16"))
    found = []
    for (out, kv, offload), (kv_dtype, grad_dtype) in itertools.product(tiers, dtypes):
        changed = shape.changed(
            out_tier=out, kv_tier=kv, optimizer_cpu_offload=offload, kv_dtype=kv_dtype, kv_grad_dtype=grad_dtype
        )
        _, needed = fullest_stage(changed)
        room = needed.total <= hardware.usable_bytes and needed.host <= hardware.host_bytes
        seconds = sum(cost.total() for cost in step_seconds(changed, hardware).values()) if room else float("inf")
        rounds = (kv_dtype, grad_dtype) != (None, "fp32")
        found.append(Candidate(changed, needed.total, seconds, room, rounds))
    return min(found, key=lambda candidate: candidate.rank)


def fewest_gpus(shape: Shape, hardware: Hardware) -> Candidate | None:
    """The best layout on the smallest world that it fits with the model's own rounding."""
    for world_size in WORLD_SIZES:
        found = best_layouts(shape.changed(world_size=world_size), hardware)
        if found and found[0].fits and not found[0].changes_numbers:
            return found[0]
    return None
