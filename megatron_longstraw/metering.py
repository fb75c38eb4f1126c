"""What each call cost: seconds and tokens put through the stack."""
from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from dataclasses import dataclass, field

import torch


@dataclass
class CallCost:
    seconds: float = 0.0
    tokens: int = 0
    """Valid tokens over all context-parallel ranks (pads not counted)."""
    calls: int = 0


@dataclass
class Meter:
    """Costs by call name (capture, rollout, score, replay, prefix_backward, full) since the last `reset`."""

    costs: dict[str, CallCost] = field(default_factory=lambda: defaultdict(CallCost))

    @contextlib.contextmanager
    def measure(self, name: str, tokens: int = 0):
        start = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            cost = self.costs[name]
            cost.seconds += time.perf_counter() - start
            cost.tokens += tokens
            cost.calls += 1

    def seconds(self, name: str) -> float:
        return self.costs[name].seconds if name in self.costs else 0.0

    def tokens(self, name: str) -> int:
        return self.costs[name].tokens if name in self.costs else 0

    def reset(self) -> None:
        self.costs.clear()
