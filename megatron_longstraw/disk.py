"""Folders a run writes into: whether they can be written, and one message when they cannot."""
from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Iterator

_PROBE_BYTES = 4096


class DiskError(RuntimeError):
    """Something could not be written; the message names the path, the cause and the flag."""


@contextlib.contextmanager
def writing(path: str | Path, flag: str) -> Iterator[None]:
    """Around what writes below `path`, which `flag` names.

    Raises:
        DiskError: it raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"{path} cannot be written: {cause(error)}; make room, or bring it back, or change {flag}"
        ) from error


def cause(error: OSError) -> str:
    """What the system says, and about which file."""
    about = error.filename2 or error.filename
    return (error.strerror or str(error)) + (f" ({about})" if about else "")


def probe(folder: Path) -> None:
    """Write a little into a folder and leave nothing behind.

    Raises:
        OSError: that is not possible.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())


def problem_with(folder: str | Path, flag: str, need_bytes: int = 0) -> str | None:
    """What keeps a run from writing into a folder, which need not exist yet, or None."""
    place = Path(folder).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        probe(place)
        free_bytes = shutil.disk_usage(place).free
    except OSError as error:
        return f"got {folder}, need a folder that can be written ({error.strerror}); change {flag}"
    if free_bytes < need_bytes:
        return f"got {folder} with {free_bytes:,} bytes free, need {need_bytes:,}; make room or change {flag}"
    return None
