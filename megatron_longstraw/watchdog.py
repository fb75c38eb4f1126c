"""Ending a process that makes no progress, with a look at what it was doing."""
from __future__ import annotations

import faulthandler
import sys
from typing import TextIO

GRACE_S = 5.0
"""On top of the process groups' timeout, so that ranks which wait for this one fail first and say for what."""


class Watchdog:
    """Writes every thread's stack and ends the process when `alive` was not called for `timeout_s` and a little more."""

    def __init__(self, timeout_s: float, output: TextIO | None = None):
        self.timeout_s, self.output = timeout_s + GRACE_S, output or sys.__stderr__

    def alive(self) -> None:
        """Start counting anew."""
        faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=self.output)

    def stop(self) -> None:
        """Count no more."""
        faulthandler.cancel_dump_traceback_later()
