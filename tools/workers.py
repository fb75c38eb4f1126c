"""Objects in processes of their own (Worker), and what the benchmarks share: their flags, and every contender in such a
process, measured once and then timed in turns.

A contender is an object with two methods, built inside its process:

    measure(gradient_file) -> dict    one untimed step; leaves {parameter name: gradient} in the file
    time() -> dict                    one timed step
"""
from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, Callable, Collection

import numpy as np
import torch

from megatron_longstraw.config import positive_int

NEGLIGIBLE = 1e-6
"""A parameter whose reference gradient is under this share of the whole is judged against the whole."""


def bench_parser(description: str, prompt_tokens: int, what: str, known: Collection[str]) -> argparse.ArgumentParser:
    """The flags of every benchmark: lengths, what is compared (--schedules, --contenders), repeats, JSON."""

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(known) or len(set(chosen)) < len(chosen):
            raise argparse.ArgumentTypeError(f"got {text!r}, need different ones of {','.join(known)}")
        return chosen

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=positive_int, default=prompt_tokens, metavar="P")
    parser.add_argument("--response-tokens", type=positive_int, default=64, metavar="R", help="tokens of every response")
    parser.add_argument(f"--{what}s", type=names, default=list(known), help=f"of {','.join(known)}")
    parser.add_argument("--repeats", type=positive_int, default=2, help=f"timed steps per {what}")
    parser.add_argument("--json", metavar="FILE", help="write one JSON object ('-': to stdout) instead of a table")
    return parser


def serve(connection, build: Callable, *args) -> None:
    """Process of one object: build it, then answer (method, arguments) requests until told to stop (None)."""
    try:
        contender = build(*args)
        connection.send((True, None))
        while (request := connection.recv()) is not None:
            connection.send((True, getattr(contender, request[0])(*request[1:])))
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone, and nobody is left to tell
    except Exception:  # told to the parent, which stops the run with it
        connection.send((False, traceback.format_exc()))


class Worker:
    """The parent's end of such a process, which ends when the parent does."""

    def __init__(self, name: str, build: Callable, *args):
        self.name = name
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, build, *args), daemon=True)
        self.process.start()
        other.close()

    def ask(self, *request):
        self.connection.send(request)
        return self.answer()

    def answer(self):
        """Raises RuntimeError when the process failed (with its traceback) or was killed."""
        try:
            succeeded, value = self.connection.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"the process of {self.name} ended with exit code {self.process.exitcode}") from None
        if not succeeded:
            raise RuntimeError(f"{self.name} failed:\n{value}")
        return value

    def stop(self) -> None:
        self.connection.send(None)
        self.process.join()


def measure_in_turns(
    contenders: dict[str, tuple[Any, ...]], repeats: int
) -> tuple[dict[str, dict], dict[str, dict[str, torch.Tensor]], dict[str, list[dict]]]:
    """Start every contender (name -> callable and arguments), measure each, then time `repeats` rounds of all.

    Returns what `measure` answered (with `peak_bytes`), the gradients, and what `time` answered (with `total_s` and
    `cpu_s`), each by contender. Progress goes to stderr.

    Raises:
        RuntimeError: a contender failed.
    """
    workers = {name: Worker(name, *build) for name, build in contenders.items()}
    for worker in workers.values():
        worker.answer()
    measured, times = {}, {name: [] for name in workers}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: str(Path(folder) / f"{name}.pt") for name in workers}
        for name, worker in workers.items():
            measured[name] = worker.ask("measure", files[name])
            _progress(f"{name}: {measured[name]['peak_bytes'] / 1e6:.1f} MB")
        grads = {name: torch.load(file) for name, file in files.items()}
    for _ in range(repeats):
        for name, worker in workers.items():
            times[name].append(worker.ask("time"))
            _progress(f"{name}: {times[name][-1]['total_s']:.2f} s, {times[name][-1]['cpu_s']:.2f} processor s")
    for worker in workers.values():
        worker.stop()
    return measured, grads, times


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parameter_errors(grads: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, float]:
    """||dg|| / ||g|| of every parameter.

    Raises:
        ValueError: the two do not have the same parameters.
    """
    if grads.keys() != reference.keys():
        raise ValueError(f"parameters on one side only: {', '.join(sorted(grads.keys() ^ reference.keys()))}")
    norms = {name: float(grad.double().norm()) for name, grad in reference.items()}
    total = float(np.linalg.norm(list(norms.values())))
    return {
        name: float((grads[name] - grad).double().norm()) / (total if norms[name] < NEGLIGIBLE * total else norms[name])
        for name, grad in reference.items()
    }


def worst_error(grads: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Worst ||dg|| / ||g|| over parameters; NaN where any is."""
    return float(np.max(list(parameter_errors(grads, reference).values())))
