"""Stopping on request: a signal is noted when it comes and honoured at the next safe point, by all ranks together."""
from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
"""Slurm sends USR1 ahead of a time limit (--signal), and TERM before it kills."""


class Interrupted(Exception):
    """The run was asked to stop and did, between two calls; no weight has moved since the last whole step."""


class StopRequest:
    """Whether this process was asked to stop. A TERM after the first request ends it at once; a second USR1 does not,
    because some schedulers signal every process and the agent hands the signal on besides."""

    def __init__(self):
        self.received: str | None = None
        """Name of the signal."""

    @property
    def asked(self) -> bool:
        return self.received is not None

    def listen(self) -> None:
        """Take the signals of this process (main thread only)."""
        for number in SIGNALS:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # one that came early is delivered here; see agent.py

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_with_torchrun() -> None:
    """Have the kernel kill this rank when the torchrun that started it is killed: each rank is in a session of its own,
    so nobody else would, and it would wait for its peers until a timeout."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, killed or not."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
