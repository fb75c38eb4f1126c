"""What a user can mend, said once on the screen however many ranks found it."""
from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

PATIENCE_S = 5.0
LOST_PEER = re.compile(r"connection (was )?(closed|reset)|broken pipe|remote process exited", re.IGNORECASE)
"""What gloo and NCCL raise on the ranks that were waiting for one that ended."""


def report(error: Exception) -> None:
    """One message on stderr: rank 0's, or another rank's if rank 0 finds nothing wrong. torchrun's summary of what
    failed repeats it."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        let_others_speak()
    text = f"{'' if rank == '0' else f'rank {rank}: '}{type(error).__name__}: {error}"
    print(text, file=sys.stderr, flush=True)
    _tell_torchrun(text)


def let_others_speak() -> None:
    """Wait to be ended. torchrun ends all ranks as soon as one has failed, and that one may not have spoken yet."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(PATIENCE_S)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error says no more than that another rank has ended."""
    return LOST_PEER.search(str(error)) is not None


def _tell_torchrun(text: str) -> None:
    """The file that torchrun reads for the reason why a rank failed (torch.distributed.elastic's ErrorHandler)."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)
