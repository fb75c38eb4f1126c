"""What a user can mend, said once on the screen however many ranks found it."""
from __future__ import annotations

import json
import os
import signal
import sys
import time

PATIENCE_S = 5.0
_LOST = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
"""What gloo's and NCCL's errors say about a rank that is gone."""


def report(error: Exception) -> None:
    """One message on stderr: rank 0's, or another rank's if rank 0 finds nothing wrong. torchrun's summary of what
    failed repeats it."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # torchrun ends all ranks as soon as one has failed, and rank 0 may not have spoken yet.
        _wait_to_be_ended()
    text = f"{'' if rank == '0' else f'rank {rank}: '}{type(error).__name__}: {error}"
    print(text, file=sys.stderr, flush=True)
    _tell_torchrun(text)


def _tell_torchrun(text: str) -> None:
    """The file that torchrun reads for the reason why a rank failed (torch.distributed.elastic's ErrorHandler)."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def _wait_to_be_ended() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(PATIENCE_S)


def lost_a_rank(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone: the cause is that rank's."""
    return any(words in str(error) for words in _LOST)


def report_lost_rank(error: RuntimeError) -> None:
    """One line on stderr, after that of the rank which is gone; none where torchrun, which has said why, ends this
    one."""
    _wait_to_be_ended()
    rank = os.environ.get("RANK", "0")
    print(
        f"rank {rank}: another rank is gone ({str(error).splitlines()[0]}); the cause is what that one said, or its "
        f"node's torchrun said about it",
        file=sys.stderr, flush=True,
    )  # fmt: skip
