"""Run one function in several gloo processes and bring the results, or the first failure, back.

    results = run_ranks(work, 2, arguments...)      # [work's result on rank 0, on rank 1]

`work(rank, *arguments)` must be a module-level function; arguments and results are pickled. Processes meet through a
file in a folder of their own, so any number of launches can run side by side. They are forked from a server that
has loaded the libraries and done nothing else, which saves seconds per rank.
"""
from __future__ import annotations

import faulthandler
import multiprocessing
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist

START_TIMEOUT_S = 120.0
"""For all ranks to have started, imported and met."""
WORK_TIMEOUT_S = 90.0
"""From then on. On a busy machine a correct test may need ten times its usual second or two."""

_PRELOAD = ("torch.distributed", "megatron.core.models.gpt", "megatron.core.distributed")
"""Loaded once by the server if this process has loaded them too, instead of by every rank."""


class RankFailure(AssertionError):
    """A rank raised, died or hung; the message holds its traceback."""


def run_ranks(work: Callable, world_size: int, *arguments: Any, timeout_s: float = WORK_TIMEOUT_S) -> list:
    """Results by rank.

    Raises:
        RankFailure: with the traceback of the rank that failed first, or, when they need longer than `timeout_s`,
            with where each rank hangs. All ranks are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in _PRELOAD if name in sys.modules])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            # No daemons, which could not start the processes that write a checkpoint; all are killed below.
            context.Process(target=_rank_main, args=(work, rank, world_size, folder, timeout_s, arguments))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, folder, timeout_s)
        finally:
            for process in processes:
                process.kill()  # no effect on a process that has ended
                process.join()
        return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(world_size)]


def _wait(processes: list, folder: Path, timeout_s: float) -> None:
    deadline, met = time.monotonic() + START_TIMEOUT_S, False
    while True:
        running = [process for process in processes if process.exitcode is None]
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        if failed:
            raise RankFailure(_first_failure(failed, processes, folder))
        if not running:
            return
        if not met and len(list(folder.glob("stack*.txt"))) == len(processes):
            # The ranks write their stacks after timeout_s; they get a moment for it.
            deadline, met = time.monotonic() + timeout_s + 2.0, True
        if time.monotonic() > deadline:
            stacks = "\n".join(path.read_text() for path in sorted(folder.glob("stack*.txt")))
            raise RankFailure(f"{len(running)} of {len(processes)} ranks hang:\n{stacks}")
        running[0].join(0.02)


def _first_failure(failed: list[int], processes: list, folder: Path) -> str:
    """Peers of a rank that raised fail as well, later, with messages about lost connections."""
    reports = sorted(folder.glob("error*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if reports:
        return reports[0].read_text()
    return "; ".join(f"rank {rank} died with exit code {processes[rank].exitcode}" for rank in failed)


def _rank_main(work: Callable, rank: int, world_size: int, folder: Path, timeout_s: float, arguments: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    timeout = timedelta(seconds=START_TIMEOUT_S + timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    with open(folder / f"stack{rank}.txt", "w") as stack:
        print(f"rank {rank}:", file=stack, flush=True)
        faulthandler.dump_traceback_later(timeout_s, file=stack)
        try:
            torch.save(work(rank, *arguments), folder / f"result{rank}.pt")
            dist.barrier()  # a rank that left early would break its peers' last collective
        except BaseException:
            # Under another name first: the parent must never read half a report.
            partial = folder / f"partial{rank}.txt"
            partial.write_text(f"rank {rank} of {world_size}:\n{traceback.format_exc()}")
            partial.rename(folder / f"error{rank}.txt")
            raise SystemExit(1)
        finally:
            faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
