"""What a user can mend, said once on the screen however many ranks found it."""
from __future__ import annotations

import os
import sys
import time

PATIENCE_S = 5.0


def report(error: Exception) -> None:
    """One message on stderr: rank 0's, or another rank's if rank 0 finds nothing wrong."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # torchrun ends all ranks as soon as one has failed, and rank 0 may not have spoken yet.
        time.sleep(PATIENCE_S)
    where = "" if rank == "0" else f"rank {rank}: "
    print(f"{where}{type(error).__name__}: {error}", file=sys.stderr, flush=True)
