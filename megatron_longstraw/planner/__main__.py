"""Bytes, seconds and limits of a run, on hardware that need not be here.

    python -m megatron_longstraw.planner --config RUN.toml [TRAINING FLAGS] --world-size 8 --hardware h20-96
    python -m megatron_longstraw.planner --config RUN.toml --world-size 8 --hardware h20-96 --solve layout

--solve context: the most positions that fit; group: the most responses per prompt; gpus: the fewest GPUs; layout: the
best split over these ranks, beside all ranks in context parallelism. The CPU's rates come from tools/calibrate.py.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Iterator, Sequence

from megatron_longstraw.config import ConfigError, check, parse_args, positive_int
from megatron_longstraw.planner.bytes import GIB, RankBytes, fullest_stage
from megatron_longstraw.planner.chunks import with_chunk_tokens
from megatron_longstraw.planner.hardware import NAMES, Hardware, hardware_of
from megatron_longstraw.planner.plan import items, layout_name, lines, plan_of_shape
from megatron_longstraw.planner.seconds import KINDS, step_seconds
from megatron_longstraw.planner.shape import PLANNED_MODELS, Shape, shape_of
from megatron_longstraw.planner.solve import (
    WORLD_SIZES,
    Candidate,
    all_context_parallel,
    best_layouts,
    fewest_gpus,
    fits,
    gains,
    largest_group,
    longest_context,
)

SHOWN = 5
"""Choices and layouts that are listed."""


def parse(argv: Sequence[str] | None = None) -> tuple[Shape, Hardware, argparse.Namespace]:
    """Raises:
    ConfigError: the configuration does not fit the ranks, or a flag of the planner has no meaning with it.
    """
    config, args = parse_args(argv, extra=_parser())
    if config.checkpoint.hf_checkpoint is not None:
        raise ConfigError(["got --hf-checkpoint, which the planner does not open; need --config with its shape"])
    if args.model is not None:
        model, linear = PLANNED_MODELS[args.model]
        config = dataclasses.replace(config, model=model)
    check(config, args.world_size)
    shape = shape_of(with_chunk_tokens(config, args.world_size), args.world_size)
    shape = shape.changed(adapter_rank=args.adapter_rank, adapter_scope=args.adapter_scope)
    shape = dataclasses.replace(shape, linear=linear if args.model is not None else None)
    if args.solve in ("group", "gpus", "layout") and config.rollout.max_prompt_length is None:
        raise ConfigError([f"got --solve {args.solve} for prompts of any length; need --max-prompt-length"])
    return shape, hardware_of(args.hardware, args.rates), args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_longstraw.planner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--config FILE ...] [--FLAG VALUE ...]",
    )
    group = parser.add_argument_group("planner")
    group.add_argument("--world-size", type=positive_int, default=1, metavar="N", help="ranks to plan for (default: 1)")
    group.add_argument("--hardware", choices=NAMES, default="h20-96", help="what the ranks run on (default: h20-96)")
    group.add_argument("--rates", metavar="FILE", help="with --hardware cpu: what tools/calibrate.py measured")
    group.add_argument("--solve", choices=("context", "group", "gpus", "layout"), help="a limit, or the best layout")
    group.add_argument("--model", choices=tuple(PLANNED_MODELS), help="one that cannot be built yet")
    group.add_argument("--adapter-rank", type=positive_int, metavar="N", help="train low-rank adapters only")
    group.add_argument("--adapter-scope", choices=("all", "responses"), default="all", help="default: all")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


# -- answers -------------------------------------------------------------------------------------------------


def answer(shape: Shape, hardware: Hardware, solve: str | None) -> dict:
    """The plan of a shape, or what was asked to be found, as one JSON object."""
    if solve == "context":
        return {"longest_context_tokens": longest_context(shape, hardware)}
    if solve == "group":
        return {"largest_group": largest_group(shape, hardware)}
    if solve == "gpus":
        found = fewest_gpus(shape, hardware)
        return {"gpus": None} if found is None else {"gpus": found.shape.world_size, **_candidate(found)}
    if solve == "layout":
        listed = [_candidate(found) for found in best_layouts(shape, hardware)[:SHOWN]]
        return {"layouts": listed, "all_context_parallel": _candidate(all_context_parallel(shape, hardware))}
    stage, needed = fullest_stage(shape)
    return {
        "bytes": {name: num_bytes for name, num_bytes, _ in items(shape, needed)},
        "pipeline_stage": stage,
        "seconds": {call: dict(cost) for call, cost in step_seconds(shape, hardware).items()},
        **_limits(shape, hardware, needed),
    }


def _limits(shape: Shape, hardware: Hardware, needed: RankBytes) -> dict:
    return {
        "hardware": hardware.name,
        "usable_bytes": hardware.usable_bytes,
        "fits": fits(shape, hardware),
        "longest_context_tokens": longest_context(shape, hardware),
        "gained_tokens": dict(gains(shape, hardware)[:SHOWN]),
    }


def _candidate(found: Candidate) -> dict:
    shape = found.shape
    return {
        "layout": layout_name(shape),
        "keeps": {"out": shape.out_tier, "kv": shape.kv_tier, "kv_dtype": shape.kv_dtype or "model's",
                  "kv_grad_dtype": shape.kv_grad_dtype, "optimizer_cpu_offload": shape.optimizer_cpu_offload},
        "bytes": found.num_bytes,
        "seconds": found.seconds if found.fits else None,
        "fits": found.fits,
    }  # fmt: skip


def text(shape: Shape, hardware: Hardware, solve: str | None) -> str:
    found = answer(shape, hardware, solve)
    if solve == "context":
        return f"{found['longest_context_tokens']:,} positions fit {hardware.name}"
    if solve == "group":
        return f"{found['largest_group']:,} responses to a prompt fit {hardware.name}"
    if solve == "gpus":
        if found["gpus"] is None:
            return f"not even {WORLD_SIZES[-1]:,} x {hardware.name} are enough"
        return f"{found['gpus']} x {hardware.name}: {_layout_row(found)}"
    if solve == "layout":
        best, *others = [*found["layouts"], found["all_context_parallel"]]
        return lines([("layout", _layout_row(best)), *(("", _layout_row(row)) for row in others)])
    return "\n".join([plan_of_shape(shape), lines(_seconds(shape, hardware)), lines(_fit(hardware, found))])


def _layout_row(row: dict) -> str:
    seconds = f"{row['seconds']:,.0f} s a step" if row["fits"] else "does not fit"
    usual = ("device", "model's", "fp32", False)
    keeps = ", ".join(f"{name} {value}" for name, value in row["keeps"].items() if value not in usual)
    return f"{row['layout']:<24}{row['bytes'] / GIB:7.1f} GiB  {seconds:<20}{keeps}"


def _seconds(shape: Shape, hardware: Hardware) -> Iterator[tuple[str, str]]:
    yield "seconds", f"a step on {hardware.name}, predicted; not measured there"
    yield "", "".join([f"{'':<18}", *(f"{kind:>14}" for kind in KINDS), f"{'all':>12}"])
    costs = step_seconds(shape, hardware)
    for call, cost in costs.items():
        yield "", "".join([f"{call:<18}", *(f"{cost[kind]:>14,.2f}" for kind in KINDS), f"{cost.total():>12,.2f}"])
    yield "", f"{'step':<18}{sum(cost.total() for cost in costs.values()):>{14 * len(KINDS) + 12},.2f}"


def _fit(hardware: Hardware, found: dict) -> Iterator[tuple[str, str]]:
    usable = f"{hardware.usable_bytes / GIB:.1f} of {hardware.memory_bytes / GIB:.1f} GiB"
    longest = found["longest_context_tokens"]
    yield "fits", f"{'yes' if found['fits'] else 'no'}: {usable} are planned for; up to {longest:,} positions fit"
    for name, tokens in found["gained_tokens"].items():
        yield "", f"{tokens:>+14,} with {name}"


def main(argv: Sequence[str] | None = None) -> int:
    try:
        shape, hardware, args = parse(argv)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(answer(shape, hardware, args.solve)))
    else:
        print(text(shape, hardware, args.solve))
    return 0


if __name__ == "__main__":
    sys.exit(main())
