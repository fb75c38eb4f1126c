"""A training run as users start it, that kills itself where a test wants it to:

    python -m megatron_longstraw.launch tests/kill_driver.py --context-parallel-size 2 ...

KILL_PLAN in the environment is JSON: either {"times": FILE}, to write how long the phases took on this rank into
FILE + rank, or {"phase", "step", "entry", "after_s", "to_the_end", "who", "told"}: at the `entry`-th time that the phase
is entered from that step on, SIGKILL comes `after_s` later, at the end of the phase at the latest unless `to_the_end` is
false (what goes on in the background has no end here); `who` is a rank or "job", `told` a file for step and time.
"""
from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Callable

PHASES = {
    "capture": ["algorithm.capture", "gradients.capture"],
    "rollout": ["algorithm.generate"],
    "replay": ["gradients.replay"],
    "prefix backward": ["gradients.prefix_backward"],
    "optimizer step": ["mcore.optimizer.PolicyOptimizer.step"],
    "checkpoint write": ["mcore.checkpoint.dist_checkpointing.save"],
    "checkpoint rename": ["mcore.checkpoint._publish"],
}
MARK = "KILL_MARK"
"""Environment variable that all processes of a run share and no others."""


def processes(mark: str) -> list[int]:
    """Those of the run with this mark, but for the calling one, in the order they were started in."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            own = f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # ended meanwhile, or another user's
        if own and path.name != str(os.getpid()):
            found.append(int(path.name))
    return sorted(found)


class Driver:
    """Stands around the phases of one rank."""

    def __init__(self, plan: dict, rank: str):
        self.plan, self.rank = plan, rank
        self.step, self.entries = -1, 0
        self.times: list[tuple[str, int, float]] = []

    def install(self) -> None:
        import importlib

        for phase, names in PHASES.items():
            for name in names:
                module, _, rest = name.rpartition(".")
                owner, attributes = None, [rest]
                while owner is None:
                    try:
                        owner = importlib.import_module(f"megatron_longstraw.{module}")
                    except ModuleNotFoundError:
                        module, _, attribute = module.rpartition(".")
                        attributes.insert(0, attribute)
                for attribute in attributes[:-1]:
                    owner = getattr(owner, attribute)
                setattr(owner, attributes[-1], self._around(phase, getattr(owner, attributes[-1])))
        from megatron_longstraw.algorithm import RLStep

        RLStep.run = self._counting_steps(RLStep.run)

    def _counting_steps(self, run: Callable) -> Callable:
        def counted(rl_step, step, groups):
            self.step = step
            return run(rl_step, step, groups)

        return counted

    def _around(self, phase: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def watched(*args, **kwargs):
            begin, is_mine = time.perf_counter(), self._enters(phase)
            if is_mine:
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
        Path(self.plan["told"]).write_text(json.dumps({"step": self.step, "at": time.time()}))
        if self.plan["who"] == "job":
            for pid in processes(os.environ[MARK]):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # ended with its parent
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    from megatron_longstraw import train
    from megatron_longstraw.config import parse_args

    plan, rank = json.loads(os.environ.get("KILL_PLAN", "{}")), os.environ["RANK"]
    driver = Driver(plan, rank)
    if plan:
        driver.install()
    status = train.exit_status(lambda: train.run(parse_args()))
    if "times" in plan:
        Path(plan["times"] + rank).write_text(json.dumps(driver.times))
    return status


if __name__ == "__main__":  # Megatron's writer starts a process that imports this file again
    sys.exit(main())
