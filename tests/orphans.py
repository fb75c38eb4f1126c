"""What a killed process leaves behind."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 20
"""For the kernel to end them and the system to collect them."""
DIES = """
def die():
    print("children:", Path(f"/proc/self/task/{os.getpid()}/children").read_text(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def assert_none_is_left(script: str, folder: Path, *arguments: object) -> None:
    """Runs a script that calls `die` while it has children. It is a file, as processes that it spawns import it."""
    path = folder / "dies.py"
    path.write_text("import os, signal, sys\nfrom pathlib import Path\n" + DIES + script)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    command = [sys.executable, path, *map(str, arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    children = [int(pid) for pid in done.stdout.partition("children:")[2].split()]
    assert children
    deadline = time.monotonic() + TIMEOUT_S
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.05)
