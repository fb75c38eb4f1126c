"""Measure how fast this machine multiplies, attends, copies and sends: the planner's rates of the CPU.

    python tools/calibrate.py cpu.json [--bf16]
    python -m megatron_longstraw.planner --config my_run.toml --hardware cpu --rates cpu.json

Takes five minutes. Each point is the minimum of repeats, on as many threads as PyTorch is given (OMP_NUM_THREADS), in
one process; `link` is an all-gather between two. Then a small step runs on one rank and on two, in three layouts:
what its calls take beyond what the points say, and their messages beyond `link`, is kept as `corrections`. Give the
precision that is planned for. The small steps are kept too (`references`), so that tools/check_planner.py can tell how
the machine's speed has changed since.
"""
from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from check_planner import Case, seconds_of, world_size_of
from workers import Worker

from megatron_longstraw.attention.kernels import attend, attend_backward
from megatron_longstraw.mcore.calls import capture, replay
from megatron_longstraw.planner.hardware import ATTENTION_BACKWARD, hardware_of
from megatron_longstraw.planner.seconds import LINKS, TOUCHED, by_link
from megatron_longstraw.planner.shape import shape_of
from megatron_longstraw.rollout.generate import generate

BUDGET_S = 0.4
"""Of repeats of one point, which runs three times at least."""
SHORTEST_S = 1e-3
"""Work that takes less is run several times for one measurement."""
MATMULS = ((16, 64, 128), (64, 128, 256), (256, 128, 512), (256, 256, 1024), (1024, 256, 1024), (1024, 512, 2048))
"""(rows, inner width, width)."""
ATTENTIONS = ((16, 64), (64, 256), (64, 1024), (256, 1024), (256, 4096), (1024, 4096))
"""(queries, keys) of 4 heads that share 2 key-value heads of 64 channels."""
READS = (64, 512, 4096, 16384)
"""Keys of one query."""
HEADS, GROUPS, CHANNELS = 4, 2, 64
SCALE = CHANNELS**-0.5
COPIES_BYTES, MOST_COPIES = 2**26, 64
ELEMENTS = (2**10, 2**13, 2**16, 2**19, 2**22)
NEXT_TO_NOTHING = dict(
    hidden_size=16,
    ffn_hidden_size=16,
    vocab_size=16,
    group_size=1,
    max_response_length=1,
    max_prompt_length=5,
    prefix_chunk_tokens=4,
)
REFERENCE = dict(
    hidden_size=192,
    ffn_hidden_size=640,
    vocab_size=1200,
    group_size=8,
    max_prompt_length=3073,
    max_response_length=48,
    prefix_chunk_tokens=384,
)
"""The small step."""
LAYOUTS: tuple[dict[str, int], ...] = (
    {},
    dict(context_parallel_size=2),
    dict(tensor_model_parallel_size=2),
    dict(pipeline_model_parallel_size=2),
)
"""One rank, then two with a kind of messages each."""
REFERENCE_STEPS = 2
ROUNDS = 5
"""Times that the layouts take turns with the small step, so that a slow minute does not fall on one of them alone."""
MESSAGES = (2**10, 2**14, 2**18, 2**22)


def seconds(*works: Callable[[], object]) -> float:
    """Of one of some equal works, the least of some runs through them; on one thread of processor time, which other
    jobs disturb less than the clock."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    found, begin, turns = [], time.perf_counter(), itertools.cycle(works)
    together = len(works)
    while len(found) < 3 or time.perf_counter() - begin < BUDGET_S:
        start = clock()
        for _ in range(together):
            next(turns)()
        taken = clock() - start
        if taken < SHORTEST_S:
            together *= 2
        else:
            found.append(taken / together)
    return min(found)


def copies(make: Callable[[], tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
    """So many operands that they come from memory, as in a step, and not from a cache."""
    first = make()
    count = COPIES_BYTES // sum(x.numel() * x.element_size() for x in first)
    return [first, *(make() for _ in range(min(MOST_COPIES, count)))]


def matmul_points(dtype: torch.dtype) -> list[tuple[float, float]]:
    points = []
    for rows, inner, width in MATMULS:
        pairs = copies(lambda: (torch.randn(rows, inner, dtype=dtype), torch.randn(width, inner, dtype=dtype)))
        works = [lambda left=left, right=right: left @ right.t() for left, right in pairs]
        points.append((2.0 * rows * inner * width, seconds(*works)))
    return points


def _attention_operands(queries: int, keys: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    q = torch.randn(queries, 1, HEADS, CHANNELS, dtype=dtype).permute(1, 2, 0, 3)
    return q, *(torch.randn(1, GROUPS, keys, CHANNELS, dtype=dtype) for _ in range(2))


def attention_points(dtype: torch.dtype) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    forward, backward = [], []
    for queries, keys in ATTENTIONS:
        sets = copies(lambda: _attention_operands(queries, keys, dtype))
        known = [attend(*qkv, causal=False, scale=SCALE) for qkv in sets]
        runs = [lambda qkv=qkv: attend(*qkv, causal=False, scale=SCALE) for qkv in sets]
        backs = [
            lambda qkv=qkv, out=out, lse=lse: attend_backward(out, *qkv, out, lse, causal=False, scale=SCALE)
            for qkv, (out, lse) in zip(sets, known)
        ]
        flops = 4.0 * HEADS * CHANNELS * queries * keys
        forward.append((flops, seconds(*runs)))
        backward.append((ATTENTION_BACKWARD * flops, seconds(*backs)))
    return forward, backward


def read_points(dtype: torch.dtype) -> list[tuple[float, float]]:
    """One query against K and V of so many bytes."""
    points = []
    for keys in READS:
        sets = copies(lambda: _attention_operands(1, keys, dtype))
        taken = seconds(*(lambda qkv=qkv: attend(*qkv, causal=False, scale=SCALE) for qkv in sets))
        points.append((2.0 * sets[0][1].numel() * sets[0][1].element_size(), taken))
    return points


def memory_points(dtype: torch.dtype) -> list[tuple[float, float]]:
    """Of one tensor among what surrounds matrix products: five of n elements are made."""

    def work(a: torch.Tensor, b: torch.Tensor) -> None:
        torch.nn.functional.silu(a), a * b, a + b, torch.cat((a, b))

    points = []
    for elements in ELEMENTS:
        pairs = copies(lambda: (torch.randn(elements, dtype=dtype), torch.randn(elements, dtype=dtype)))
        taken = seconds(*(lambda pair=pair: work(*pair) for pair in pairs))
        points.append((float(TOUCHED * elements * pairs[0][0].element_size()), taken / 5))
    return points


def adam_points() -> list[tuple[float, float]]:
    """By parameters, in matrices of 2^18."""
    points = []
    for matrices in (1, 4, 16):
        parameters = [torch.nn.Parameter(torch.zeros(2**18)) for _ in range(matrices)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        points.append((float(matrices * 2**18), seconds(torch.optim.AdamW(parameters).step)))
    return points


def overheads(dtype: torch.dtype) -> dict[str, float]:
    """What models cost whose tensors are next to nothing: per layer, and per micro-batch beside them."""
    taken = {}
    for layers in (1, 5):
        case = Case.build(NEXT_TO_NOTHING | dict(num_layers=layers, bf16=dtype == torch.bfloat16))
        store = capture(case.policy, case.batch)
        captured = seconds(lambda: capture(case.policy, case.batch).release())
        replayed = seconds(lambda: replay(case.policy, store, case.batch, case.weights))
        taken[layers] = captured, replayed, seconds(lambda: generate(case.policy, store, case.batch, step=0))
        store.release()
    forward, both, token = ((taken[5][call] - taken[1][call]) / 4 for call in (0, 1, 2))
    return {
        "layer_forward_s": forward,
        "layer_backward_s": max(0.0, both - forward),
        "micro_batch_s": max(0.0, taken[1][0] - forward),
        "layer_token_s": token,
        "token_s": max(0.0, taken[1][2] - token),
    }


class Peer:
    """One rank of some that meet, in a Worker's process."""

    def __init__(self, rank: int, world_size: int, folder: str, num_threads: int):
        torch.set_num_threads(num_threads)
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        self.world_size, self.rates_file = world_size, Path(folder) / f"rates{rank}.json"

    def messages(self) -> list[tuple[float, float]]:
        points = []
        for num_bytes in MESSAGES:
            own, both = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 2)
            taken = []
            for _ in range(20):  # a fixed number, so that both do equally many
                start = time.perf_counter()
                dist.all_gather_into_tensor(both, own)
                taken.append(time.perf_counter() - start)
            points.append((float(num_bytes), min(taken)))
        return points

    def step(self, options: dict, rates: dict) -> dict[str, tuple[float, Counter[str]]]:
        """(measured seconds, planned seconds by kind) of each call of the small step."""
        case = Case.build(options)
        [measured] = seconds_of([case], REFERENCE_STEPS)
        self.rates_file.write_text(json.dumps(rates | {"corrections": {}}))
        planned = by_link(shape_of(case.policy.config, self.world_size), hardware_of("cpu", str(self.rates_file)))
        return {call: (measured[call], planned[call]) for call in measured}


@contextmanager
def peers(world_size: int, num_threads: int) -> Iterator[Callable[..., Any]]:
    """What has a method of Peer run by all ranks, and returns the first one's answer."""
    with tempfile.TemporaryDirectory() as folder:
        started = [
            Worker(f"rank {rank} of {world_size}", Peer, rank, world_size, folder, num_threads) for rank in range(world_size)
        ]

        def ask(*request: object) -> Any:
            for worker in started:
                worker.connection.send(request)
            return [worker.answer() for worker in started][0]

        for worker in started:
            worker.answer()
        yield ask
        for worker in started:
            worker.stop()


def link_points() -> list[tuple[float, float]]:
    """Bytes sent to one peer."""
    with peers(2, num_threads=1) as ask:
        return ask("messages")


def references(rates: dict, options: dict) -> tuple[list[dict], dict[str, dict[str, float]]]:
    """(the small step in each layout, corrections). For these see Hardware: of work by the step on one rank, of messages
    by what steps on two take beyond their work."""
    layouts = [options | layout for layout in LAYOUTS]
    threads = torch.get_num_threads()
    with peers(1, threads) as alone, peers(2, threads) as both:
        ask = {1: alone, 2: both}
        rounds = [[ask[world_size_of(own)]("step", own, rates) for own in layouts] for _ in range(ROUNDS)]
    steps: list[dict] = []
    factors: dict[str, dict[str, float]] = {}
    for own, found in zip(layouts, zip(*rounds)):
        taken = {call: min(calls[call][0] for calls in found) for call in found[0]}
        steps.append(dict(options=own, seconds=taken))
        for call, (_, planned) in found[0].items():
            known = factors.setdefault(call, {})
            links = {link: seconds for link, seconds in planned.items() if link in LINKS and seconds}
            work = planned.total() - sum(links.values())
            if own == options:
                known["work"] = taken[call] / work
            for link in links:
                known.setdefault(link, max(0.0, taken[call] - work * known["work"]) / sum(links.values()))
    return steps, factors


def growing(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """By amount, without points that took less time than a smaller amount."""
    kept: list[tuple[float, float]] = []
    for amount, taken in sorted(points):
        if not kept or (amount > kept[-1][0] and taken > kept[-1][1]):
            kept.append((amount, taken))
    return kept


def calibrate(dtype: torch.dtype) -> dict:
    forward, backward = attention_points(dtype)
    curves = {
        "matmul": matmul_points(dtype),
        "attention": forward,
        "attention_backward": backward,
        "attention_read": read_points(dtype),
        "memory": memory_points(dtype),
        "link": link_points(),
        "adam": adam_points(),
    }
    rates = {
        **{name: growing(points) for name, points in curves.items()},
        **overheads(dtype),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
    }
    steps, factors = references(rates, REFERENCE | {"bf16": dtype == torch.bfloat16})
    return rates | {"references": steps, "corrections": factors}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the rates, as JSON")
    parser.add_argument("--bf16", action="store_true", help="of bfloat16 instead of float32")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    start = time.perf_counter()
    rates = calibrate(torch.bfloat16 if args.bf16 else torch.float32)
    args.file.write_text(json.dumps(rates, indent=1) + "\n")
    for name in ("matmul", "attention", "attention_backward"):
        amount, taken = rates[name][-1]
        print(f"{name:<20}{amount / taken / 1e9:8.1f} GFLOP/s")
    for name in ("memory", "link"):
        amount, taken = rates[name][-1]
        print(f"{name:<20}{amount / taken / 1e9:8.1f} GB/s")
    for call, factors in rates["corrections"].items():
        print(f"{call:<20}{', '.join(f'{kind} {factor:.2f}' for kind, factor in factors.items())} times as long")
    print(f"{args.file}: {rates['threads']} threads, {rates['dtype']}, {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
