"""What the planner says beside what a step takes, in bytes and in seconds.

    python tools/check_planner.py                                     # bytes, of all cases of one rank
    torchrun --nproc-per-node 2 tools/check_planner.py                # of two
    python tools/calibrate.py cpu.json && python tools/check_planner.py --rates cpu.json       # seconds

Bytes are what a step allocates above weights, gradients and optimizer (allocation_tracker.py). Seconds are minima
over --repeats steps, in which each case takes turns with the calibration's small step in its layout. What a call of that
step takes now over what it took in the calibration is the drift of the machine's speed meanwhile; `ratio` is planned
over measured seconds as they are, `ratio at speed` with the drift taken out.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy as np
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from allocation_tracker import peak_bytes_of

from megatron_longstraw.config import load_config
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.calls import capture, full_sequences, prefix_backward, replay
from megatron_longstraw.mcore.optimizer import PolicyOptimizer
from megatron_longstraw.mcore.packing import PromptBatch
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.planner.bytes import RankBytes, bytes_of_rank
from megatron_longstraw.planner.hardware import hardware_of
from megatron_longstraw.planner.seconds import step_seconds
from megatron_longstraw.planner.shape import shape_of
from megatron_longstraw.rollout.generate import generate
from megatron_longstraw.types import Branch, PromptGroup

BASE = dict(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=384,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=500,
    group_size=4,
    max_prompt_length=513,
    max_response_length=16,
    prefix_chunk_tokens=128,
)
_CHUNKS_OF_256 = dict(ffn_hidden_size=512, vocab_size=2000, prefix_chunk_tokens=256, max_prompt_length=1025)
MOE = dict(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=96, moe_shared_expert_intermediate_size=64)
BYTES = {
    "base": {},
    "deep, recompute": dict(num_layers=8, recompute_granularity="full"),
    "two layers a unit": dict(recompute_granularity="full", recompute_num_layers=2),
    "wide": dict(hidden_size=256, ffn_hidden_size=512, num_attention_heads=8, num_query_groups=8),
    "narrow ffn, many heads": dict(ffn_hidden_size=64, num_attention_heads=8, num_query_groups=1, kv_channels=32),
    "bf16, qk norm, bias": dict(bf16=True, qk_layernorm=True, add_qkv_bias=True),
    "bf16, recompute": dict(bf16=True, recompute_granularity="full", prefix_out_tier="none"),
    "frozen": dict(prefix_grad="frozen"),
    "last:1": dict(prefix_grad="last:1", max_prompt_length=1025),
    "long responses": dict(max_response_length=128, prefix_chunk_tokens=64),
    "chunks of 256": _CHUNKS_OF_256,
    "chunks of 256, long responses": _CHUNKS_OF_256 | dict(max_response_length=128),
    "chunks of 256, bf16, recompute": _CHUNKS_OF_256 | dict(recompute_granularity="full", bf16=True),
    "group of 16": dict(group_size=16, branches_per_microbatch=8, max_response_length=32, prefix_chunk_tokens=64),
    "vocabulary, tied": dict(vocab_size=20000, max_response_length=64, log_probs_chunk_size=128),
    "vocabulary, untied": dict(vocab_size=20000, untie_embeddings_and_output_weights=True, prefix_grad="frozen"),
    "out recomputed": dict(prefix_out_tier="none", max_prompt_length=1025, prefix_block_tokens=256),
    "long prompt": dict(num_layers=2, max_prompt_length=4097, prefix_chunk_tokens=64, prefix_block_tokens=1024),
    "two prompts": dict(prompts_per_microbatch=2, train_batch_size=2, ppo_mini_batch_size=2),
    "full": dict(schedule="full", max_prompt_length=257),
    "experts": MOE,
    "one layer": dict(num_layers=1, max_prompt_length=1025),
    "two layers": dict(num_layers=2, prefix_chunk_tokens=256, qk_layernorm=True),
    "fp8 K, V": dict(prefix_kv_dtype="fp8", prefix_grad_dtype="bf16", max_prompt_length=1025),
    "fp8 K, V, bf16, small blocks": dict(
        prefix_kv_dtype="fp8", bf16=True, max_prompt_length=2049, prefix_block_tokens=256
    ),
    "host": dict(prefix_kv_tier="host", prefix_out_tier="host", max_prompt_length=1025),
    "host, a layer on the device, recompute": dict(
        prefix_kv_tier="host",
        prefix_device_bytes="1100K",
        prefix_block_tokens=512,
        max_prompt_length=1025,
        recompute_granularity="full",
    ),
    "MLP blocks": dict(prefix_mlp_block_tokens=32, prefix_chunk_tokens=256, ffn_hidden_size=768),
    "MLP blocks, recompute": _CHUNKS_OF_256 | dict(prefix_mlp_block_tokens=64, recompute_granularity="full"),
    "cp2": dict(context_parallel_size=2),
    "cp2, host, fp8 K, V": dict(context_parallel_size=2, prefix_kv_tier="host", prefix_kv_dtype="fp8"),
    "cp2, bf16, recompute": dict(context_parallel_size=2, bf16=True, recompute_granularity="full"),
    "tp2": dict(tensor_model_parallel_size=2),
    "tp2 sp": dict(tensor_model_parallel_size=2, sequence_parallel=True, bf16=True),
    "tp2 sp, MLP blocks": dict(
        tensor_model_parallel_size=2, sequence_parallel=True, prefix_mlp_block_tokens=32, prefix_chunk_tokens=256
    ),
    "pp2": dict(pipeline_model_parallel_size=2),
    "pp2, a layer each": dict(pipeline_model_parallel_size=2, num_layers=2, prefix_chunk_tokens=256),
    "pp2, recompute": dict(pipeline_model_parallel_size=2, recompute_granularity="full", bf16=True),
    "ep2": MOE | dict(expert_model_parallel_size=2),
}
"""What a case changes of BASE."""
_LARGER = dict(hidden_size=256, ffn_hidden_size=768, vocab_size=2000, max_prompt_length=4097, prefix_chunk_tokens=512)
SECONDS = {
    "exact": _LARGER,
    "recompute": _LARGER | dict(recompute_granularity="full"),
    "frozen, two layers": _LARGER | dict(prefix_grad="frozen", num_layers=2),
    "long": _LARGER | dict(max_prompt_length=12289, prefix_chunk_tokens=1024, num_layers=2),
    "responses of 128": _LARGER | dict(max_prompt_length=2049, max_response_length=128, group_size=8),
    "cp2": _LARGER | dict(context_parallel_size=2),
    "tp2": _LARGER | dict(tensor_model_parallel_size=2),
    "pp2": _LARGER | dict(pipeline_model_parallel_size=2),
}


SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def layout_of(options: dict) -> tuple[int, ...]:
    return tuple(options.get(name, 1) for name in SIZES)


def world_size_of(options: dict) -> int:
    return max(math.prod(layout_of(options)), options.get("expert_model_parallel_size", 1))


@dataclass
class Case:
    """A policy and given responses with random weights."""

    policy: Policy
    optimizer: PolicyOptimizer
    batch: PromptBatch
    weights: dict

    @classmethod
    def build(cls, options: dict, like: Case | None = None) -> Case:
        """Beside a case of the same layout, or with new process groups, which end those of earlier cases."""
        config = load_config(overrides=BASE | options).resolve()
        policy = Policy(config, like.policy.layout if like else parallel.initialize(config))
        rng, rollout = np.random.default_rng(0), config.rollout
        shape = (config.prefix.prompts_per_microbatch, rollout.group_size, rollout.max_response_length)
        responses = rng.integers(0, config.model.vocab_size, shape)
        prompts = rng.integers(0, config.model.vocab_size, (shape[0], rollout.max_prompt_length))
        batch = PromptBatch([PromptGroup(p, [Branch(ids) for ids in own]) for p, own in zip(prompts, responses)])
        weights = rng.standard_normal(shape).astype(np.float32)
        places = ((prompt, index) for prompt in range(shape[0]) for index in range(shape[1]))
        return cls(policy, PolicyOptimizer(policy), batch, {place: weights[place] for place in places})

    def step(self) -> None:
        """All calls of an update."""
        policy, batch = self.policy, self.batch
        policy.zero_grad()
        if policy.config.prefix.schedule == "full":
            full_sequences(policy, batch, self.weights)
            return
        store = capture(policy, batch)
        replay(policy, store, batch, self.weights)
        prefix_backward(policy, store, batch)
        store.release()

    def bytes(self) -> tuple[int, int, RankBytes]:
        """(allocated, planned, all that is planned) beside weights, gradients and optimizer; on the CPU host memory
        counts too."""
        planned = bytes_of_rank(self.policy.config, dist.get_world_size(), self.policy.layout.pp_rank)
        return peak_bytes_of(self.step), planned.held + planned.fullest.num_bytes + planned.host, planned

    def seconds(self) -> dict[str, float]:
        """Of each call of a step that samples and moves the weights."""
        policy, batch, found = self.policy, self.batch, {}

        def timed(name: str, call: Callable, *args, **options):
            start = time.perf_counter()
            result = call(*args, **options)
            found[name] = time.perf_counter() - start
            return result

        policy.zero_grad()
        store = timed("capture", capture, policy, batch)
        timed("rollout", generate, policy, store, batch, step=0)
        timed("replay", replay, policy, store, batch, self.weights)
        timed("prefix_backward", prefix_backward, policy, store, batch)
        store.release()
        timed("optimizer", lambda: (policy.finalize_gradients(), self.optimizer.step()))
        return found


def check_bytes(cases: dict[str, dict]) -> list[dict]:
    rows = []
    for name, options in cases.items():
        measured, planned, _ = Case.build(options).bytes()
        rows.append(dict(case=name, measured=measured, planned=planned, ratio=planned / measured))
    return rows


def seconds_of(cases: list[Case], repeats: int) -> list[dict[str, float]]:
    """Of each case's calls, the least of steps in which the cases take turns, after one of each as a warm-up."""
    turns = [[case.seconds() for case in cases] for _ in range(repeats + 1)][1:]
    return [{call: min(step[call] for step in steps) for call in steps[0]} for steps in zip(*turns)]


def check_seconds(name: str, options: dict, rates: str, repeats: int) -> list[dict]:
    """By call, and of all calls together, whose drift is that of what is planned for them."""
    hardware = hardware_of("cpu", rates)
    references = json.loads(Path(rates).read_text())["references"]
    then = next(step for step in references if layout_of(step["options"]) == layout_of(options))
    reference = Case.build(then["options"])
    case = Case.build(options, like=reference)
    now, taken = seconds_of([reference, case], repeats)
    found = step_seconds(shape_of(case.policy.config, dist.get_world_size()), hardware)
    planned = {call: found[call].total() for call in taken if call in found}
    at_speed = {call: seconds * now[call] / then["seconds"][call] for call, seconds in planned.items()}
    measured = {call: taken[call] for call in planned}
    for column in (planned, at_speed, measured):
        column["all"] = sum(column.values())
    return [
        dict(
            case=name,
            call=call,
            planned=planned[call],
            measured=seconds,
            ratio=planned[call] / seconds,
            drift=at_speed[call] / planned[call],
            ratio_at_speed=at_speed[call] / seconds,
        )
        for call, seconds in measured.items()
    ]


def parse(argv: list[str] | None = None) -> tuple[dict[str, dict], argparse.Namespace]:
    """Also the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", metavar="FILE", help="compare seconds, with what tools/calibrate.py wrote")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps per case (default: 3)")
    parser.add_argument("--case", action="append", metavar="NAME", help="only this one; repeatable")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    cases = {name: o for name, o in (SECONDS if args.rates else BYTES).items() if world_size_of(o) == ranks}
    if args.case:
        unknown = sorted(set(args.case) - set(cases))
        if unknown:
            parser.error(f"got --case {unknown[0]!r}, need one of {'; '.join(cases)} on {ranks} ranks")
        cases = {name: cases[name] for name in args.case}
    return cases, args


def main() -> int:
    cases, args = parse()
    if args.rates is None:
        rows = check_bytes(cases)
    else:
        rows = [row for name, options in cases.items() for row in check_seconds(name, options, args.rates, args.repeats)]
    if int(os.environ.get("RANK", "0")):
        return 0
    if args.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        name = f"{row['case']:<32}{row.get('call', ''):<17}"
        ratios = [f"{key.replace('_', ' ')} {row[key]:.3f}" for key in ("ratio", "drift", "ratio_at_speed") if key in row]
        print(f"{name}planned {row['planned']:>14,.6g}   measured {row['measured']:>14,.6g}   {'   '.join(ratios)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
