"""What branch replay takes at one length: bytes, seconds, messages, and a check of its gradient by finite differences.

    torchrun --nproc-per-node 8 tools/long_context_receipt.py --positions 131072 --json receipt.json
    torchrun --nproc-per-node 8 tools/long_context_receipt.py --positions 2097152 --prefix-grad frozen \\
        --state capture/ --json receipt.json

Random tokens, random dL/dlogp, a model as small as a model can be; takes every training flag, and all ranks share the
prompt (context parallelism). ONE capture serves a group of 2 responses and then one of 8, at equally many responses
per micro-batch; the gradient is that of both groups together. Then the loss is evaluated a little way along that
gradient, forwards and backwards: under `exact` the prompt is captured again there, under `frozen` its state is held
fixed. With --state, a frozen capture is written to a folder as it goes, and the same command goes on from there.

The JSON object of rank 0 has, under `phases`, seconds, peak bytes (of the rank that needed most, above weights and
gradients) and work (work_counter.py, of the rank that did most) of capture, replay of both groups, and prefix backward.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Callable

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from allocation_tracker import AllocationTracker
from capture_files import CaptureFiles
from work_counter import Work, WorkCounter

from megatron_longstraw.config import Config, ConfigError, parse_args, positive_int
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.calls import Table, capture, capture_chunks, open_store, prefix_backward, replay, score
from megatron_longstraw.mcore.packing import PromptBatch
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.planner.bytes import bytes_of_rank
from megatron_longstraw.prefix.store import PrefixStore
from megatron_longstraw.run_log.environment import environment
from megatron_longstraw.types import Branch, PromptGroup
from megatron_longstraw.user_errors import report

DEFAULTS = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "num_attention_heads": 1,
    "vocab_size": 128,
    "init_method_std": 0.2,
    "rotary_base": 1e7,
    "prefix_chunk_tokens": 16384,
    "branches_per_microbatch": 2,
    "max_response_length": 64,
    "distributed_timeout_minutes": 60.0,
}
GROUP_SIZES = (2, 8)


def parse(argv: list[str] | None, world_size: int) -> tuple[Config, argparse.Namespace]:
    """Raises ConfigError also for layouts in which ranks do not all share the prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=positive_int, default=131072, help="tokens of the prompt and one response")
    parser.add_argument("--step", type=float, default=1e-2, help="length of the finite-difference step in the weights")
    parser.add_argument("--no-check", action="store_true", help="leave the finite differences out")
    parser.add_argument("--state", type=Path, help="folder for the capture as it goes (frozen only)")
    parser.add_argument("--state-interval-s", type=float, default=300.0, help="seconds between writes to --state")
    parser.add_argument("--json", type=Path, help="file to write; default: the screen")
    config, args = parse_args(argv, extra=parser, defaults=DEFAULTS | {"context_parallel_size": world_size})
    problems = []
    if config.parallel.context_parallel_size != world_size:
        got = f"got context_parallel_size {config.parallel.context_parallel_size}"
        problems.append(f"{got}, need {world_size}: the ranks of a receipt all share the prompt")
    if args.positions <= config.rollout.max_response_length + 1:
        problems.append(f"got --positions {args.positions}, need more than --max-response-length and a token of prompt")
    if args.state is not None and config.prefix.prefix_grad != "frozen":
        problems.append("--state holds K and V only: it needs --prefix-grad frozen")
    if problems:
        raise ConfigError(problems)
    lengths = {"max_prompt_length": args.positions - config.rollout.max_response_length, "group_size": max(GROUP_SIZES)}
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **lengths)).resolve(), args


class Receipt:
    """Model, prompt and responses, and what has been measured of them."""

    def __init__(self, config: Config, args: argparse.Namespace):
        self.config, self.args = config, args
        self.policy = Policy(config, parallel.initialize(config))
        rng = np.random.default_rng(config.run.seed)
        rollout, vocab = config.rollout, config.model.vocab_size
        prompt = rng.integers(0, vocab, rollout.max_prompt_length)
        self.batches: dict[int, PromptBatch] = {}
        self.weights: dict[int, Table] = {}
        for size in GROUP_SIZES:
            shape = (size, rollout.max_response_length)
            self.batches[size] = PromptBatch([PromptGroup(prompt, [Branch(x) for x in rng.integers(0, vocab, shape)])])
            self.weights[size] = {(0, i): w for i, w in enumerate(rng.standard_normal(shape, dtype=np.float32))}
        self.phases: dict[str, dict] = {}
        self.tracker, self.counter = AllocationTracker(), WorkCounter()

    def measure(self, phase: str, body: Callable[[], object], earlier_s: float = 0.0):
        """Run `body` as a phase: its seconds (and those of earlier runs), peak bytes and work, over all ranks."""
        dist.barrier()
        self.tracker.peak_bytes, before = self.tracker.live_bytes, dataclasses.replace(self.counter.work)
        begin = time.perf_counter()
        with self.tracker, self.counter:
            result = body()
        dist.barrier()
        seconds = time.perf_counter() - begin + earlier_s
        work = dataclasses.asdict(self.counter.work - before)
        peak_bytes, *most = self.most([self.tracker.peak_bytes, *work.values()])
        self.phases[phase] = {"seconds": seconds, "peak_bytes": peak_bytes, "work": dict(zip(work, most))}
        say(f"{phase:16} {seconds:9.1f} s   peak {peak_bytes:,} bytes")
        return result

    def run(self) -> dict:
        policy = self.policy
        policy.zero_grad()
        store, logprobs = self.captured(), {}
        for size in GROUP_SIZES:
            self.measure(f"replay_{size}", lambda: logprobs.update({size: self.replayed(store, size)}))
        self.measure("prefix_backward", lambda: prefix_backward(policy, store, self.batches[GROUP_SIZES[0]]))
        state_bytes = self.most([store.nbytes.total])[0]
        policy.finalize_gradients()
        return {
            "positions": self.args.positions,
            "prefix_grad": self.config.prefix.prefix_grad,
            "ranks": dist.get_world_size(),
            "phases": self.phases,
            "state_bytes_after": state_bytes,
            "step": self.step_bytes(),
            "finite_difference": None if self.args.no_check else self.finite_difference(store, self.loss(logprobs)),
            "chunks": store.plan.num_chunks,
            "received_bytes_per_chunk_and_layer": self.received_bytes_per_chunk_and_layer(store),
            "config": self.describe(),
            "machine": machine(),
        }

    def captured(self) -> PrefixStore:
        batch = self.batches[GROUP_SIZES[0]]
        store = open_store(self.policy, batch)
        files = CaptureFiles(self.args.state, self.policy, store) if self.args.state else None
        done, earlier_s = files.load() if files else (0, 0.0)

        def run() -> None:
            nonlocal done
            begin = written = time.perf_counter()
            for index in range(done, store.plan.num_chunks):
                capture_chunks(self.policy, store, batch, range(index, index + 1))
                if files and self.most([time.perf_counter() - written])[0] > self.args.state_interval_s:
                    written = time.perf_counter()
                    files.write(range(done, index + 1), earlier_s + written - begin)
                    done = index + 1
                    say(f"{'capture':16} {earlier_s + written - begin:9.1f} s   {done} of {store.plan.num_chunks} chunks")

        self.measure("capture", run, earlier_s)
        return store

    def replayed(self, store: PrefixStore, size: int) -> Table:
        return replay(self.policy, store, self.batches[size], self.weights[size])[0]

    def loss(self, logprobs: dict[int, Table]) -> float:
        """sum(w * logp) over both groups, in float64."""
        return sum(
            float(np.dot(self.weights[size][place].astype(np.float64), values.astype(np.float64)))
            for size, table in logprobs.items()
            for place, values in table.items()
        )

    def step_bytes(self) -> dict:
        """Peak of a training step with either group, weights and gradients included, and what the planner says of it."""
        planned = bytes_of_rank(self.config, dist.get_world_size())
        stored = planned.weights + planned.gradients
        others = max(self.phases[name]["peak_bytes"] for name in ("capture", "prefix_backward"))
        peaks = {size: stored + max(others, self.phases[f"replay_{size}"]["peak_bytes"]) for size in GROUP_SIZES}
        small, large = peaks.values()
        state = planned.prefix_kv + planned.prefix_attention + planned.prefix_grad
        return {
            "peak_bytes": {str(size): peak for size, peak in peaks.items()},
            "added_by_larger_group": large / small - 1,
            "planned_bytes": stored + state + planned.activations,
            "planned": vars(planned) | {"fullest": {planned.fullest.name: dict(planned.fullest.kinds)}},
        }

    def received_bytes_per_chunk_and_layer(self, store: PrefixStore) -> dict[str, float]:
        parts = store.plan.num_chunks * self.config.model.num_layers
        return {name: self.phases[name]["work"]["received_bytes"] / parts for name in ("capture", "prefix_backward")}

    def finite_difference(self, store: PrefixStore, loss: float) -> dict:
        """(L(theta + s d) - L(theta - s d)) / 2 s for d = gradient / |gradient|, whose true value is |gradient|."""
        parameters = [parameter for chunk in self.policy.chunks for parameter in chunk.parameters()]
        gradients = [parameter.main_grad.clone() for parameter in parameters]
        origins = [parameter.detach().clone() for parameter in parameters]
        norm = float(torch.sqrt(sum((gradient.double() ** 2).sum() for gradient in gradients)))
        losses, begin = [], time.perf_counter()
        for step in (self.args.step, -self.args.step):
            with torch.no_grad():
                for parameter, origin, gradient in zip(parameters, origins, gradients):
                    parameter.copy_(origin + step / norm * gradient)
            self.policy.weights_changed()
            losses.append(self.loss(self.scored(store)))
        slope = (losses[0] - losses[1]) / (2 * self.args.step)
        say(f"{'differences':16} {time.perf_counter() - begin:9.1f} s   slope {slope:.6g}, gradient {norm:.6g}")
        return {"step": self.args.step, "loss": loss, "slope": slope, "gradient_norm": norm, "relative_error": abs(slope / norm - 1)}

    def scored(self, store: PrefixStore) -> dict[int, Table]:
        if self.config.prefix.prefix_grad == "frozen":
            # The state held fixed while the weights move: what the frozen gradient is the gradient of.
            store.weights_version = self.policy.weights_version
        else:
            store.release()
            store = capture(self.policy, self.batches[GROUP_SIZES[0]], walk_back=False)
        return {size: score(self.policy, store, self.batches[size])[0] for size in GROUP_SIZES}

    def most(self, values: list[float]) -> list[float]:
        """Each value's maximum over all ranks."""
        most = torch.tensor(values, dtype=torch.float64, device=self.policy.layout.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return [value if isinstance(own, float) else int(value) for own, value in zip(values, most.tolist())]

    def describe(self) -> dict:
        fields = (*DEFAULTS, "kv_channels", "num_query_groups", "bf16", "prefix_block_tokens", "prefix_out_tier", "seed")
        config = self.config
        sections = (config.model, config.parallel, config.prefix, config.rollout, config.run)
        return {name: getattr(section, name) for section in sections for name in fields if hasattr(section, name)}


def machine() -> dict:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    processor = next((x.split(":")[1].strip() for x in Path("/proc/cpuinfo").open() if x.startswith("model name")), "")
    threads = {"cores": os.cpu_count(), "threads_per_rank": torch.get_num_threads()}
    return {"processor": processor or platform.processor(), "memory_bytes": pages * page_bytes, **threads, **environment()}


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    try:
        world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        config, args = parse(argv, world_size)
        result = Receipt(config, args).run()
    except ConfigError as error:
        report(error)
        return 2
    if dist.get_rank() == 0:
        text = json.dumps(result, indent=2) + "\n"
        args.json.write_text(text) if args.json else print(text, end="")
    return 0


if __name__ == "__main__":
    status = main()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(status)
