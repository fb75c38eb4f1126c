"""A run of several ranks that kills itself where a test wants it to.

`run_job` is what `python -m megatron_longstraw.agent ... -m megatron_longstraw.train FLAGS` does, in a process that has
loaded the libraries: agent and ranks are processes of their own in sessions of their own, made by fork alone, which
saves the seconds that each would take to load them.

A plan is either {"times": FILE}, to write how long the phases took on each rank into FILE + rank, or {"phase", "step",
"entry", "after_s", "to_the_end", "who", "told"}: at the `entry`-th time that the phase is entered from that step on,
SIGKILL comes `after_s` later, at the end of the phase at the latest (or, where `to_the_end` is false because it goes on
in the background, when a checkpoint gets its name); `who` is a rank or "job", `told` a file for step and time.
"""
from __future__ import annotations

import functools
import json
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Callable

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from megatron_longstraw import agent, algorithm, gradients, train
from megatron_longstraw.config import parse_args
from megatron_longstraw.mcore import checkpoint
from megatron_longstraw.mcore.optimizer import PolicyOptimizer

PHASES = {
    "capture": [(algorithm, "capture"), (gradients, "capture")],
    "rollout": [(algorithm, "generate")],
    "replay": [(gradients, "replay")],
    "prefix backward": [(gradients, "prefix_backward")],
    "optimizer step": [(PolicyOptimizer, "step")],
    "checkpoint write": [(checkpoint.dist_checkpointing, "save")],
    "checkpoint rename": [(checkpoint, "_publish")],
}


def processes(folder: Path) -> list[int]:
    """Those that run in a folder, but for the calling one, in the order they were started in."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            here = os.readlink(path / "cwd") == str(folder)
        except OSError:
            continue  # ended meanwhile, or another user's
        if here and path.name != str(os.getpid()):
            found.append(int(path.name))
    return sorted(found)


def run_job(folder: Path, flags: list[str], plan: dict) -> None:
    """Run two ranks in a folder, all that they print going to its screen.txt; ends with the agent's exit status."""
    os.setsid()
    os.chdir(folder)
    with open("screen.txt", "wb") as screen:
        os.dup2(screen.fileno(), 1)
        os.dup2(screen.fileno(), 2)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    SubprocessHandler._popen = functools.partialmethod(_fork_rank, plan)
    sys.argv = ["agent", "--standalone", "--nproc-per-node=2", "-m", "megatron_longstraw.train", *flags]
    agent.main()


def _fork_rank(handler: SubprocessHandler, plan: dict, command: tuple[str, ...], environ: dict[str, str]) -> _Rank:
    arguments = command[command.index("megatron_longstraw.train") + 1 :]
    return _Rank(lambda: _rank_main(plan, list(arguments)), environ)


class _Rank(subprocess.Popen):
    """Runs a function in a fork of this process instead of a program in a new one."""

    def __init__(self, body: Callable[[], int], environ: dict[str, str]):
        self.body = body
        super().__init__(["rank"], env=environ)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        self.pid = os.fork()
        self._child_created = True
        if self.pid:
            return
        status = 1
        try:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)  # torchrun's
            os.environ.clear()
            os.environ.update(env)
            status = self.body()
        finally:
            if sys.exc_info()[0]:
                traceback.print_exc()
            multiprocessing.util._exit_function()  # as at the end of any process
            sys.stdout.flush()
            os._exit(status)


def _rank_main(plan: dict, flags: list[str]) -> int:
    driver = Driver(plan, os.environ["RANK"])
    driver.install()
    status = train.exit_status(lambda: train.run(parse_args(flags)))
    if "times" in plan:
        Path(plan["times"] + driver.rank).write_text(json.dumps(driver.times))
    return status


class Driver:
    """Stands around the phases of one rank."""

    def __init__(self, plan: dict, rank: str):
        self.plan, self.rank = plan, rank
        self.step, self.entries, self.armed = -1, 0, False
        self.dying = threading.Lock()
        self.times: list[tuple[str, int, float]] = []

    def install(self) -> None:
        for phase, places in PHASES.items():
            for owner, name in places:
                setattr(owner, name, self._around(phase, getattr(owner, name)))
        algorithm.RLStep.run = self._counting_steps(algorithm.RLStep.run)

    def _counting_steps(self, run: Callable) -> Callable:
        def counted(rl_step, step, groups):
            self.step = step
            return run(rl_step, step, groups)

        return counted

    def _around(self, phase: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def watched(*args, **kwargs):
            begin, is_mine = time.perf_counter(), self._enters(phase)
            if self.armed and phase == "checkpoint rename":  # the end of what goes on in the background
                self._kill()
            if is_mine:
                self.armed = True
                threading.Timer(self.plan["after_s"], self._kill).start()
            try:
                return function(*args, **kwargs)
            finally:
                if is_mine and self.plan["to_the_end"]:
                    self._kill()
                self.times.append((phase, self.step, time.perf_counter() - begin))

        return watched

    def _enters(self, phase: str) -> bool:
        if phase != self.plan.get("phase") or self.step < self.plan["step"]:
            return False
        if self.rank != str(0 if self.plan["who"] == "job" else self.plan["who"]):
            return False
        self.entries += 1
        return self.entries == self.plan["entry"]

    def _kill(self) -> None:
        self.dying.acquire()  # the timer may come at the phase's very end
        Path(self.plan["told"]).write_text(json.dumps({"step": self.step, "at": time.time()}))
        if self.plan["who"] == "job":
            if os.fork() == 0:
                _kill_all(Path.cwd())
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_all(folder: Path) -> None:
    """As a scheduler does: from outside, until none of a job's processes is left, those included that one of them had
    just started."""
    os.chdir("/")
    while others := processes(folder):
        for pid in others:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # ended with its parent
    os._exit(0)
