"""How far a long phase is: a live bar on a terminal, now and then a line in a log. Nothing for short phases."""
from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Callable, TextIO

import numpy as np
from tqdm import tqdm

from megatron_longstraw.metering import Amount

PARTS = {
    "capture": "chunks",
    "prefix_backward": "chunks",
    "rollout": "tokens a response",
    "score": "micro-batches",
    "replay": "micro-batches",
    "full": "sequences",
}
"""What a phase is counted in; those of a step (sample, update) in batches of prompts."""
BAR_DELAY_S = 1.0
"""A phase that has run for less has no bar."""
REFRESH_S = 0.2


class _Bar(tqdm):
    monitor_interval = 0  # no thread of its own: whoever writes checkpoints may fork


@dataclass
class _Phase:
    name: str
    total: Amount
    history: list[tuple[Amount, float]] = field(default_factory=list)
    """(done, at which second), one entry before each part."""
    bar: _Bar | None = None

    @property
    def done(self) -> Amount:
        return self.history[-1][0]

    @property
    def seconds(self) -> float:
        return self.history[-1][1] - self.history[0][1]

    def numbers(self, now: float) -> str:
        """ "512/1,024 chunks, 31,000 tokens/s, 01:20 left" """
        parts = [f"{self.done.parts:,}/{self.total.parts:,} {PARTS.get(self.name, 'batches')}"]
        if self.done.tokens and self.seconds:
            parts.append(f"{self.done.tokens / self.seconds:,.0f} tokens/s")
        left = seconds_left(self.history, self.total)
        if left is not None:
            since = now - self.history[-1][1]
            parts.append(f"{_Bar.format_interval(round(max(left - since, 0.0)))} left")
        return ", ".join(parts)


class ProgressDisplay:
    """Shows the phases that a `Meter` reports (it is a `metering.Watcher`).

    Args:
        say: prints a line; at most one in `interval_s` seconds, and none within that time after `quiet`.
        stream: where bars go if it is a terminal; then no lines are said.
        clock: seconds.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        interval_s: float,
        stream: TextIO,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.title = ""
        self._say, self._interval_s, self._stream, self._clock = say, interval_s, stream, clock
        # Some terminals in containers say that they have no columns; a bar would not be seen there.
        self._live = stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
        self._phases: dict[str, _Phase] = {}
        self._shown_at = clock()

    def quiet(self, title: str) -> None:
        """Something else was just printed; `title` says what comes next ("step 4/120")."""
        self.title, self._shown_at = title, self._clock()

    def progress(self, phase: str, done: Amount, total: Amount) -> None:
        now = self._clock()
        state = self._phases.setdefault(phase, _Phase(phase, total))
        state.history.append((done, now))
        if now - self._shown_at < (REFRESH_S if self._live else self._interval_s):
            return
        self._shown_at = now
        if self._live:
            self._draw(now)
        else:
            phases = "; ".join(f"{state.name} {state.numbers(now)}" for state in self._phases.values())
            self._say(f"progress   {self.title}: {phases}")

    def end(self, phase: str) -> None:
        state = self._phases.pop(phase, None)
        if state is not None and state.bar is not None:
            state.bar.close()

    def close(self) -> None:
        for phase in reversed(list(self._phases)):
            self.end(phase)

    def _draw(self, now: float) -> None:
        for state in self._phases.values():
            if state.bar is None and now - state.history[0][1] < BAR_DELAY_S:
                continue
            shape = f"{self.title:<11}{state.name:<16}{{bar:24}} {state.numbers(now)}"
            if state.bar is None:
                state.bar = _Bar(
                    total=state.total.parts, leave=False, file=self._stream, dynamic_ncols=True, bar_format=shape
                )
            state.bar.bar_format, state.bar.n = shape, state.done.parts
            state.bar.refresh()


def seconds_left(history: list[tuple[Amount, float]], total: Amount) -> float | None:
    """Seconds from the last entry of the history until `total` is done; None before the first part is done.

    A part is taken to cost a seconds a token and b a pair of tokens, both fitted to the parts so far: of a long prompt
    the last chunks cost many times the first ones, and the walk back begins with them.
    """
    size = "tokens" if total.tokens else "parts"
    points = np.array([[getattr(done, size), done.pairs, second] for done, second in history], dtype=float)
    if len(points) > 4:
        points = points[1:]  # the first part also pays for what is set up on first use
    if len(points) < 2:
        return None
    left = np.array([getattr(total, size), total.pairs], dtype=float) - points[-1, :2]
    steps = np.diff(points, axis=0)
    scale = np.maximum(np.abs(steps).max(axis=0), 1e-30)  # pairs are millions of millions
    cost = np.linalg.lstsq(steps[:, :2] / scale[:2], steps[:, 2], rcond=1e-6)[0] / scale[:2]
    if (cost < 0).any():
        whole = points[-1] - points[0]
        cost = np.array([whole[2] / whole[0], 0.0])
    return float(left @ cost)
