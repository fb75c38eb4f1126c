"""torchrun that looks after its ranks:  python -m megatron_longstraw.agent [TORCHRUN FLAGS] PROGRAM [FLAGS]

torchrun by itself dies of that signal, and its ranks, each in a session of its own, are not in the process group that
schedulers signal. Here the signal is handed on to every rank. Until a rank listens (interruption.py), it stays pending
there, so that one that comes early is neither lost nor deadly. Where a rank has said why it failed, torchrun's own
account of it is left out.

A rank that dies of a signal cannot say so, and torchrun does only when all others have ended: here it is said at once.
What such a rank had started (the writers of a checkpoint) would go on by itself, and is ended with the others.
"""
from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

HANDED_ON = signal.SIGUSR1
_PR_SET_CHILD_SUBREAPER = 36
"""Of prctl(2): processes whose parent dies become children of this one."""


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


def deaths(ranks: dict[int, int]) -> list[str]:
    """A line for each rank that has died of a signal and was not waited for yet.

    Args:
        ranks: global rank by process.
    """
    lines = []
    for pid, rank in ranks.items():
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue  # waited for
        if ended is not None and ended.si_code != os.CLD_EXITED:
            number = ended.si_status
            hint = ", which the kernel sends where memory runs out" if number == signal.SIGKILL else ""
            lines.append(f"rank {rank} (process {pid}) died of signal {number} ({signal.strsignal(number)}){hint}")
    return lines


def _speak_of_deaths() -> None:
    """Have torchrun look for dead ranks just before it does so itself, and before it ends the others."""
    from torch.distributed.launcher import api

    class Agent(api.LocalElasticAgent):
        def _monitor_workers(self, worker_group):
            for line in deaths({worker.id: worker.global_rank for worker in worker_group.workers}):
                print(line, file=sys.stderr, flush=True)
            return super()._monitor_workers(worker_group)

    api.LocalElasticAgent = Agent


def _end_what_is_left() -> None:
    while left := children(os.getpid()):
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main() -> None:
    # Blocked signals stay so in the processes that are started from here; a handler would not.
    signal.pthread_sigmask(signal.SIG_BLOCK, {HANDED_ON})
    signal.signal(HANDED_ON, signal.SIG_DFL)  # whoever started this may ignore it until here
    threading.Thread(target=_hand_on, daemon=True).start()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    _speak_of_deaths()
    try:
        torchrun()
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if not os.path.exists(first.error_file):
            raise
        sys.exit(1)  # the rank has said why (user_errors.py)
    finally:
        _end_what_is_left()


if __name__ == "__main__":
    main()
