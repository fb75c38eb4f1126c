"""Bytes of tensors that come and go, and the most at once."""
from __future__ import annotations

from collections import Counter

ACTIVATIONS, COMMUNICATION, LOGITS, WEIGHT_GRADIENTS = "activations", "communication", "logits", "weight gradients"
PREFIX_GRADIENTS = "dK, dV"


class Tape:
    """Bytes of named tensors that are alive, and the most at once by kind."""

    def __init__(self):
        self._alive: dict[str, tuple[float, str]] = {}
        self.peak_bytes = 0.0
        self.created: list[float] = []
        """Bytes of every tensor that there was."""
        self.at_peak: Counter[str] = Counter()

    def new(self, name: str, num_bytes: float, kind: str = ACTIVATIONS) -> None:
        self._alive[name] = (num_bytes, kind)
        self.created.append(num_bytes)
        if self.alive_bytes > self.peak_bytes:
            self.peak_bytes, self.at_peak = self.alive_bytes, Counter()
            for size, of_kind in self._alive.values():
                self.at_peak[of_kind] += size

    def free(self, *names: str) -> None:
        for name in names:
            self._alive.pop(name, None)

    def briefly(self, name: str, num_bytes: float, kind: str = ACTIVATIONS) -> None:
        self.new(name, num_bytes, kind)
        self.free(name)

    @property
    def alive_bytes(self) -> float:
        return sum(size for size, _ in self._alive.values())
