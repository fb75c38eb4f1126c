"""torchrun whose ranks receive SIGUSR1:  python -m megatron_longstraw.agent [TORCHRUN FLAGS] PROGRAM [FLAGS]

torchrun by itself dies of that signal, and its ranks, each in a session of its own, are not in the process group that
schedulers signal. Here the signal is handed on to every rank. Until a rank listens (interruption.py), it stays pending
there, so that one that comes early is neither lost nor deadly. Where a rank has said why it failed, torchrun's own
account of it is left out.
"""
from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

HANDED_ON = signal.SIGUSR1


def children(pid: int) -> list[int]:
    """Processes whose parent this is."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _parent(path) == pid]


def _parent(process: Path) -> int | None:
    try:
        # The name before the last ")" may hold anything; state and parent follow.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None  # ended meanwhile


def _hand_on() -> None:
    while True:
        signal.sigwait({HANDED_ON})
        for pid in children(os.getpid()):
            try:
                os.kill(pid, HANDED_ON)
            except ProcessLookupError:
                pass  # ended meanwhile


def main() -> None:
    # Blocked signals stay so in the processes that are started from here; a handler would not.
    signal.pthread_sigmask(signal.SIG_BLOCK, {HANDED_ON})
    signal.signal(HANDED_ON, signal.SIG_DFL)  # whoever started this may ignore it until here
    threading.Thread(target=_hand_on, daemon=True).start()
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun()
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if not os.path.exists(first.error_file):
            raise
        sys.exit(1)  # the rank has said why (user_errors.py)


if __name__ == "__main__":
    main()
