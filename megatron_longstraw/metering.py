"""What each call cost (seconds, and tokens put through the stack), and how far a running one is."""
from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Iterator, Protocol, Sequence, TypeVar

import torch

Item = TypeVar("Item")


@dataclass
class CallCost:
    seconds: float = 0.0
    tokens: int = 0
    """Valid tokens over all context-parallel ranks (pads not counted)."""
    calls: int = 0


@dataclass(frozen=True)
class Amount:
    """How much of a phase: all of it, or what is done."""

    parts: int
    """What the phase is counted in: micro-batches of a call, decoding steps, batches of prompts."""
    tokens: int = 0
    pairs: int = 0
    """Pairs of tokens that attention compares: what a part costs beside its tokens."""


class Watcher(Protocol):
    """Hears of phases that have parts. They nest: an inner one ends first."""

    def progress(self, phase: str, done: Amount, total: Amount) -> None:
        """Before each part."""

    def end(self, phase: str) -> None:
        """After a phase, also of one that had no parts or failed."""


@dataclass
class Meter:
    """Costs by call name (capture, rollout, score, replay, prefix_backward, full, ...) since the last `reset`."""

    costs: dict[str, CallCost] = field(default_factory=lambda: defaultdict(CallCost))
    peaks: dict[str, float] = field(default_factory=dict)
    """Largest value of a quantity since the last `reset`, by metric name."""
    watcher: Watcher | None = None
    _running: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def measure(self, name: str, tokens: int = 0):
        start = time.perf_counter()
        self._running.append(name)
        try:
            yield
        finally:
            self._running.pop()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            cost = self.costs[name]
            cost.seconds += time.perf_counter() - start
            cost.tokens += tokens
            cost.calls += 1
            if self.watcher is not None:
                self.watcher.end(name)

    def progress(self, done: Amount, total: Amount) -> None:
        """Tell the watcher how far the call being measured is."""
        if self.watcher is not None and self._running:
            self.watcher.progress(self._running[-1], done, total)

    def track(self, phase: str, items: Sequence[Item]) -> Iterator[Item]:
        """The items, telling the watcher how many are done (of a single one its calls say enough)."""
        if self.watcher is None or len(items) < 2:
            yield from items
            return
        for number, item in enumerate(items):
            self.watcher.progress(phase, Amount(number), Amount(len(items)))
            yield item
        self.watcher.end(phase)

    def peak(self, name: str, value: float) -> None:
        self.peaks[name] = max(value, self.peaks.get(name, value))

    def seconds(self, name: str) -> float:
        return self.costs[name].seconds if name in self.costs else 0.0

    def tokens(self, name: str) -> int:
        return self.costs[name].tokens if name in self.costs else 0

    def reset(self) -> None:
        self.costs.clear()
        self.peaks.clear()
