"""Longest contexts of known models on one node, predicted, as a Markdown table.

    python tools/plan_table.py --hardware h20-96

A cell is the most positions (a prompt and one of 8 responses of 8,192 tokens) and the hours of a step with one prompt,
under the layout of 8 GPUs that goes furthest with full activation recompute:

    exact, frozen          all parameters are trained
    exact, host            exact, with K, V, dK, dV in host memory
    LoRA                   exact, adapters of rank 16 on all tokens
    LoRA, responses        adapters of rank 16 on responses only, where frozen is exact
    full sequences         GPUs for one sequence as long as `exact` goes, with full recompute and ring attention,
                           nothing on the host; and the hours of a step there
"""
from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from megatron_longstraw.config import load_config, validate
from megatron_longstraw.planner.hardware import HARDWARE, Hardware
from megatron_longstraw.planner.seconds import step_seconds
from megatron_longstraw.planner.shape import PLANNED_MODELS, Shape, shape_of
from megatron_longstraw.planner.solve import fits, layouts, longest_context, unbounded

MODELS = Path(__file__).parents[1] / "launch/models"
NAMES = ("qwen2.5-7b", "llama-3.1-8b", "qwen3-8b", "qwen3-30b-a3b", *PLANNED_MODELS)
RESPONSE_TOKENS, GROUP_SIZE, CHUNK_TOKENS, WORLD_SIZE, ADAPTER_RANK = 8192, 8, 16384, 8, 16
MODES = {
    "exact": {},
    "exact, host": dict(kv_tier="host"),
    "frozen": dict(prefix_grad="frozen"),
    "LoRA": dict(adapter_rank=ADAPTER_RANK),
    "LoRA, responses": dict(adapter_rank=ADAPTER_RANK, adapter_scope="responses"),
}
MOST_GPUS = 4096


def model_shape(name: str) -> Shape:
    options = dict(
        group_size=GROUP_SIZE,
        max_response_length=RESPONSE_TOKENS,
        branches_per_microbatch=1,
        prefix_chunk_tokens=CHUNK_TOKENS,
        recompute_granularity="full",
        max_prompt_length=CHUNK_TOKENS,
    )
    if name in PLANNED_MODELS:
        model, linear = PLANNED_MODELS[name]
        config = dataclasses.replace(load_config([], options), model=model)
        return unbounded(shape_of(config, WORLD_SIZE).changed(linear=linear))
    return unbounded(shape_of(load_config([MODELS / f"{name}.toml"], options), WORLD_SIZE))


def furthest(shape: Shape, hardware: Hardware) -> tuple[int, Shape]:
    """(positions, the shape that reaches them): out and lse are kept only where that costs no context."""
    candidates = [layout.changed(out_tier=tier) for layout in layouts(shape) for tier in ("device", "none")]
    reached = [(longest_context(candidate, hardware), candidate) for candidate in candidates]
    context, best = max(reached, key=lambda pair: pair[0])
    return context, best.changed(max_prompt_length=max(1, context - RESPONSE_TOKENS))


def hours(shape: Shape, hardware: Hardware) -> float:
    return sum(cost.total() for cost in step_seconds(shape, hardware).values()) / 3600


def full_sequences(shape: Shape, context: int, hardware: Hardware) -> tuple[int, float] | None:
    """(GPUs, hours) of the smallest world in which one sequence fits."""
    for nodes in range(1, MOST_GPUS // WORLD_SIZE + 1):
        for tp in (1, 2, 4, 8):
            whole = shape.changed(
                world_size=nodes * WORLD_SIZE, schedule="full", prefix_grad="exact", tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=1, context_parallel_size=1, sequence_parallel=tp > 1,
                use_distributed_optimizer=True, expert_model_parallel_size=1 if shape.model.num_experts is None else 8,
            )  # fmt: skip
            ranks = nodes * WORLD_SIZE // tp
            # Ring attention keeps one rank's rows and no others', as a rank of its own with that many rows would.
            one = whole.changed(max_prompt_length=max(1, -(-context // ranks) - RESPONSE_TOKENS))
            if not validate(whole.config, whole.world_size) and fits(one, hardware):
                shared = whole.changed(context_parallel_size=ranks, max_prompt_length=context - RESPONSE_TOKENS)
                return whole.world_size, hours(shared, hardware)
    return None


def row(name: str, hardware: Hardware) -> str:
    shape, cells = model_shape(name), []
    contexts = {}
    for mode, options in MODES.items():
        contexts[mode], best = furthest(shape.changed(**options), hardware)
        cells.append(f"{contexts[mode] / 1e6:.2f} M, {hours(best, hardware):.1f} h")
    found = full_sequences(shape, contexts["exact"], hardware)
    cells.append(f"over {MOST_GPUS}" if found is None else f"{found[0]:,}, {found[1]:.1f} h")
    return " | ".join([f"| {name}", *cells]) + " |"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", choices=tuple(HARDWARE), default="h20-96", help="default: h20-96")
    return parser.parse_args(argv)


def main() -> int:
    hardware = HARDWARE[parse().hardware]
    print(f"| {WORLD_SIZE} x {hardware.name} | {' | '.join(MODES)} | full sequences |")
    print("|---" * (len(MODES) + 2) + "|")
    for name in NAMES:
        print(row(name, hardware), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
