"""Seconds, peak tensor bytes and gradient error of one optimizer step's gradient under different schedules.

    python tools/bench_step.py --prompt-tokens 16384 --group-size 8 --response-tokens 64 \\
        --schedules full,full_recompute,packed,exact,frozen --json -

    full            one whole sequence per response (--schedule full), plain autograd
    full_recompute  the same with --recompute-granularity full
    packed          prompt and responses as one row with the right mask, with full recompute (packed_baseline.py)
    exact, frozen   branch replay with and without the gradient through the prompt

Takes every training flag; what a schedule is named after wins over flags. Every schedule runs in a process of its
own on the same weights and data, and log-probs exist for response positions only. Peak bytes and gradients come
from one untimed step, seconds are minima over --repeats steps in which the schedules take turns. Peak bytes are
what the step allocates above weights and gradient buffers, counted by allocation (allocation_tracker.py). `cpu_s`
are processor seconds over all threads, which a busy machine disturbs less than `total_s`.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from allocation_tracker import peak_bytes_of
from packed_baseline import PackedModel, PackedRow
from workers import bench_parser, measure_in_turns, worst_error

from megatron_longstraw import config as cfg
from megatron_longstraw.config import Config, ConfigError
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.calls import capture, full_sequences, prefix_backward, replay
from megatron_longstraw.mcore.packing import PromptBatch
from megatron_longstraw.mcore.parameters import named_shards
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.types import Branch, PromptGroup

DEFAULTS = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 1024,
    "vocab_size": 4096,
    "prefix_chunk_tokens": 1024,
    "prefix_block_tokens": 2048,  # K, V and their gradients of one head stay in a CPU core's cache
}
_NO_RECOMPUTE = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
SCHEDULES = {
    "full": {"schedule": "full", "prefix_grad": "exact"} | _NO_RECOMPUTE,
    "full_recompute": {"schedule": "full", "prefix_grad": "exact", "recompute_granularity": "full"},
    "packed": {"schedule": "full", "prefix_grad": "exact", "recompute_granularity": "full"},
    "exact": {"schedule": "branch", "prefix_grad": "exact"},
    "frozen": {"schedule": "branch", "prefix_grad": "frozen"},
}
"""What makes a schedule: fields that win over flags."""


# -- command line --------------------------------------------------------------------------------------------


def tool_parser() -> argparse.ArgumentParser:
    return bench_parser(__doc__, 16384, "schedule", SCHEDULES)


def parse(argv: list[str] | None = None) -> tuple[dict[str, Config], argparse.Namespace]:
    """A configuration per schedule: bench defaults < TOML files < flags < what the schedule is."""
    _, args = cfg.parse_args(argv, extra=tool_parser(), defaults=DEFAULTS)
    configs = {name: cfg.config_from_args(args, DEFAULTS, SCHEDULES[name]).resolve() for name in args.schedules}
    for config in configs.values():
        cfg.check(config, world_size=1)
    return configs, args


# -- one schedule, in a process of its own -------------------------------------------------------------------


class Bench:
    """One schedule's model and data (random tokens, a random dL/dlogp for each response token), and its step."""

    def __init__(self, schedule: str, config: Config, prompt_tokens: int, response_tokens: int):
        self.schedule, self.config = schedule, config
        self.policy = Policy(config, parallel.initialize(config))
        rng = np.random.default_rng(config.run.seed)
        prompt = rng.integers(0, config.model.vocab_size, prompt_tokens)
        shape = (config.rollout.group_size, response_tokens)
        self.group = PromptGroup(prompt, [Branch(ids) for ids in rng.integers(0, config.model.vocab_size, shape)])
        self.weights = rng.standard_normal(shape).astype(np.float32)
        self.chunk_timer = LastChunkTimer(self.policy)
        self.packed = PackedModel(self.policy, PackedRow(prompt_tokens, *shape)) if schedule == "packed" else None

    def step(self) -> None:
        """From zeroed to finalized gradients, as the algorithm's first update does it (no score pass)."""
        policy, batch = self.policy, PromptBatch([self.group])
        table = {(0, index): values for index, values in enumerate(self.weights)}
        policy.zero_grad()
        if self.packed is not None:
            self.packed.accumulate_gradients(self.group, self.weights)
        elif self.schedule.startswith("full"):
            full_sequences(policy, batch, table)
        else:
            store = capture(policy, batch)
            replay(policy, store, batch, table)
            prefix_backward(policy, store, batch)
            store.release()
        policy.finalize_gradients()

    def measure(self, gradient_file: str) -> dict:
        """The untimed step: peak bytes and tokens; leaves the gradients by global name in a file."""
        self.policy.meter.reset()
        peak_bytes = peak_bytes_of(self.step)
        grads = {shard.name: parameter.main_grad for shard, parameter in named_shards(self.policy.chunks, self.config.model)}
        torch.save(grads, gradient_file)
        tokens = {name: cost.tokens for name, cost in self.policy.meter.costs.items()}
        return {"peak_bytes": peak_bytes, "tokens": tokens}

    def time(self) -> dict:
        """Seconds of one step: in total, of all threads, per call, per token of the last prompt chunk's capture."""
        self.policy.meter.reset()
        self.chunk_timer.seconds_per_token = None
        start, cpu_start = time.perf_counter(), time.process_time()
        self.step()
        total, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        calls = {name: cost.seconds for name, cost in self.policy.meter.costs.items()}
        per_token = self.chunk_timer.seconds_per_token
        return {"total_s": total, "cpu_s": cpu, "calls_s": calls, "last_chunk_s_per_token": per_token}


class LastChunkTimer:
    """Times the model's forward of the last chunk inside capture: the one that sees the whole prompt, as every
    replayed token does, so that the two compare token by token."""

    def __init__(self, policy: Policy):
        self.seconds_per_token: float | None = None
        (model,) = policy.ddp
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after, with_kwargs=True)

    def _before(self, _module, _args):
        self._start = time.perf_counter()

    def _after(self, _module, _args, kwargs, _output):
        params = kwargs.get("packed_seq_params")
        mb = None if params is None else params.micro_batch
        if mb is not None and mb.appends and mb.chunk_index == mb.store.plan.num_chunks - 1:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds_per_token = (time.perf_counter() - self._start) / mb.rows.num_tokens


# -- the whole run -------------------------------------------------------------------------------------------


def run(configs: dict[str, Config], args: argparse.Namespace) -> dict:
    lengths = args.prompt_tokens, args.response_tokens
    contenders = {name: (Bench, name, config, *lengths) for name, config in configs.items()}
    results, grads, timed = measure_in_turns(contenders, args.repeats)
    schedules, last_chunk = {}, {}
    for name, times in timed.items():
        schedules[name] = {
            "total_s": min(t["total_s"] for t in times),
            "cpu_s": min(t["cpu_s"] for t in times),
            "calls_s": {call: min(t["calls_s"][call] for t in times) for call in times[0]["calls_s"]},
            **results[name],
            "worst_param_rel_err": worst_error(grads[name], grads["full"]) if "full" in grads else None,
        }
        last_chunk[name] = min((t["last_chunk_s_per_token"] for t in times if t["last_chunk_s_per_token"]), default=None)
    return {"schedules": schedules, "ratios": ratios(schedules, last_chunk), "config": describe(configs, args)}


def ratios(schedules: dict[str, dict], last_chunk: dict[str, float | None]) -> dict[str, float]:
    """How many times faster (speedup), and what share of the peak bytes, branch replay is against the others."""
    result = {}
    for ours in ("exact", "frozen"):
        for theirs in ("full", "full_recompute", "packed"):
            if ours in schedules and theirs in schedules:
                a, b = schedules[ours], schedules[theirs]
                result[f"{ours}_speedup_over_{theirs}"] = b["total_s"] / a["total_s"]
                result[f"{ours}_peak_over_{theirs}"] = a["peak_bytes"] / b["peak_bytes"]
    for ours in ("exact", "frozen"):
        if last_chunk.get(ours):
            cost = schedules[ours]
            per_token = cost["calls_s"]["replay"] / cost["tokens"]["replay"]
            result.setdefault("replay_per_token_over_last_capture_chunk", per_token / last_chunk[ours])
    return result


def describe(configs: dict[str, Config], args: argparse.Namespace) -> dict:
    config = next(iter(configs.values()))
    model, prefix = config.model, config.prefix
    names = [*DEFAULTS, "bf16", "branches_per_microbatch"]
    shape = {name: getattr(model if hasattr(model, name) else prefix, name) for name in names}
    return {
        "prompt_tokens": args.prompt_tokens,
        "group_size": config.rollout.group_size,
        "response_tokens": args.response_tokens,
        **shape,
        "seed": config.run.seed,
        "repeats": args.repeats,
        "threads": torch.get_num_threads(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }


def table(result: dict) -> str:
    lines = [f"{'schedule':15} {'seconds':>9} {'peak MB':>9} {'error':>9}  calls: seconds (tokens)"]
    for name, cost in result["schedules"].items():
        error = "-" if cost["worst_param_rel_err"] is None else f"{cost['worst_param_rel_err']:.1e}"
        calls = ", ".join(f"{call} {s:.2f} ({cost['tokens'][call]})" for call, s in cost["calls_s"].items())
        lines.append(f"{name:15} {cost['total_s']:9.2f} {cost['peak_bytes'] / 1e6:9.1f} {error:>9}  {calls}")
    lines += [f"{name:45} {value:.3f}" for name, value in result["ratios"].items()]
    return "\n".join(lines)


def main() -> int:
    try:
        configs, args = parse()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    result = run(configs, args)
    if args.json is None:
        print(table(result))
    elif args.json == "-":
        print(json.dumps(result))
    else:
        Path(args.json).write_text(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
