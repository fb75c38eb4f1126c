"""A folder of checkpoints: Megatron's names, checksums, what counts as whole, what is kept. No tensors here.

    FOLDER/latest_checkpointed_iteration.txt    "20", or "release" for converted weights; moves last
    FOLDER/iter_0000020/                        torch_dist files and manifest.json with their sizes and checksums

A checkpoint is written under a name that starts with a dot and renamed when all of it is on the disk, so whatever has a
checkpoint's name was whole once; the checksums find what happened to it since.
"""
from __future__ import annotations

import json
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from megatron_longstraw.config import ConfigError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Megatron's name of a checkpoint that was converted, not trained."""
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a folder."""

    path: Path
    iteration: int | None
    """Steps done; None for converted weights."""

    def damage(self, rank: int = 0, world_size: int = 1) -> str | None:
        """What is wrong with this rank's share of its files, or None."""
        if not self.path.is_dir():
            return f"{self.path} is missing"
        manifest = self.path / MANIFEST
        if not manifest.exists():
            # Other programs' checkpoints have none; ours always do.
            return None if self.iteration is None else f"{manifest} is missing"
        try:
            files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
            for name, (size_bytes, checksum) in sorted(files.items())[rank::world_size]:
                path = self.path / name
                if not path.is_file():
                    return f"{path} is missing"
                if path.stat().st_size != size_bytes:
                    return f"{path} has {path.stat().st_size} bytes, not {size_bytes}"
                if file_checksum(path) != checksum:
                    return f"{path} has changed since it was written (checksum)"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{manifest} cannot be used ({type(error).__name__}: {error})"
        return None


def file_checksum(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    checksum = 0
    with path.open("rb") as file:
        while part := file.read(2**22):
            checksum = zlib.crc32(part, checksum)
    return checksum


def folder_name(iteration: int | None) -> str:
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def partial_path(folder: Path, iteration: int | None) -> Path:
    return folder / f".{folder_name(iteration)}.partial"


def begin(folder: Path, iteration: int | None) -> Path:
    """An empty folder under a temporary name to write a checkpoint into. `folder` must exist: one that is gone in the
    middle of a run may be a disk that is."""
    partial = partial_path(folder, iteration)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    return partial


def sweep(folder: Path) -> None:
    """Remove what a run that was killed left under temporary names."""
    for name in (".iter_*.partial", ".iter_*.removed"):
        for path in folder.glob(name):
            shutil.rmtree(path, ignore_errors=True)


def measure(partial: Path, rank: int, world_size: int) -> dict[str, list[int]]:
    """[size in bytes, checksum] of this rank's share of a folder's files, by name."""
    paths = sorted(path for path in partial.rglob("*") if path.is_file())[rank::world_size]
    return {path.relative_to(partial).as_posix(): [path.stat().st_size, file_checksum(path)] for path in paths}


def publish(folder: Path, iteration: int | None, files: dict[str, list[int]], facts: dict[str, Any]) -> Checkpoint:
    """Give a written checkpoint its name, and let the tracker name it.

    Args:
        files: what all ranks measured.
        facts: go into the manifest beside them.
    """
    partial, final = partial_path(folder, iteration), folder / folder_name(iteration)
    _write(partial / MANIFEST, json.dumps({"files": files, **facts}, indent=1))
    if final.exists():  # whole, but never named by the tracker, or the run went back behind it
        shutil.rmtree(final)
    partial.rename(final)
    _sync_folder(folder)
    _write(folder / f".{TRACKER}.partial", RELEASE if iteration is None else str(iteration))
    (folder / f".{TRACKER}.partial").rename(folder / TRACKER)
    _sync_folder(folder)
    return Checkpoint(final, iteration)


def candidates(folder: str | Path) -> list[Checkpoint]:
    """The checkpoint that the tracker names and those before it, newest first; empty without a tracker.

    Raises:
        ConfigError: the tracker holds neither a number nor "release".
    """
    folder = Path(folder)
    tracker = folder / TRACKER
    if not tracker.exists():
        return []
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text == RELEASE:
        return [Checkpoint(folder / RELEASE, None)]
    if not text.isdigit():
        raise ConfigError([f"{tracker} holds {text[:40]!r}, need a number of steps or {RELEASE!r}; change --load"])
    numbers = [int(path.name[5:]) for path in folder.glob("iter_*") if path.name[5:].isdigit()]
    numbers = sorted({*(number for number in numbers if number <= int(text)), int(text)}, reverse=True)
    return [Checkpoint(folder / folder_name(number), number) for number in numbers]


def newest_whole(
    folder: str | Path, examine: Callable[[Checkpoint], str | None] = Checkpoint.damage
) -> tuple[Checkpoint | None, list[str]]:
    """The newest undamaged checkpoint, and a line about each newer one that was passed over.

    Args:
        examine: says what is wrong with a checkpoint; ranks that share the work must answer alike.

    Raises:
        ConfigError: there are checkpoints and all are damaged.
    """
    notes = []
    for checkpoint in candidates(folder):
        problem = examine(checkpoint)
        if problem is None:
            return checkpoint, notes
        notes.append(f"checkpoint {checkpoint.path.name} is damaged: {problem}")
    if notes:
        raise ConfigError([*notes, f"no whole checkpoint is left in {folder}; change --load or --resume-mode"])
    return None, notes


def prune(folder: Path, keep_last: int | None, keep_every: int | None) -> None:
    """Remove checkpoints but for the last `keep_last` (None: all) and those whose step `keep_every` divides."""
    if keep_last is None:
        return
    old = [checkpoint for checkpoint in candidates(folder)[keep_last:] if checkpoint.iteration is not None]
    for checkpoint in old:
        if not keep_every or checkpoint.iteration % keep_every:
            # Under another name first: half a folder must not have a checkpoint's name.
            gone = folder / f".{checkpoint.path.name}.removed"
            shutil.rmtree(gone, ignore_errors=True)
            checkpoint.path.rename(gone)
            shutil.rmtree(gone)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """A rename is on the disk only when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
