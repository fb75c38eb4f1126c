"""Safetensors files of a folder: headers checked against the files and the index; blocks read, and written in place.

A file is 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, and the tensors' bytes. Reading
goes through the safetensors library, which maps the file: a rank touches only the pages of its own blocks. Writing
fills a copy of a source file's header at the same offsets, so that any number of ranks write their blocks into one file.
"""
from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import safetensors
import torch
from torch import Tensor

from megatron_longstraw.convert.errors import FolderError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LARGEST_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_TORCH_DTYPE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes that weights may have."""

Block = tuple[slice, ...]


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor's bytes are."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    """From the beginning of the file."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class TensorFiles:
    """The tensors of a folder, by name.

    Raises:
        FolderError: no safetensors files, a damaged file, or an index that does not fit them; names tensor and file.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.entries: dict[str, TensorEntry] = {}
        problems: list[str] = []
        names = self._file_names(problems)
        for name in names:
            try:
                self._add(name, read_header(folder / name), problems)
            except _Damaged as error:
                problems.append(f"{name}: {error}")
            except OSError as error:
                problems.append(f"{name}: cannot be read ({error.strerror})")
        if not problems and (folder / INDEX).exists():
            problems += self._index_problems()
        if problems:
            raise FolderError(folder, problems)
        self.files = names
        self._handles: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum((self.folder / name).stat().st_size for name in self.files)

    def read(self, name: str, block: Block) -> Tensor:
        """A block of a tensor, in the file's dtype.

        Raises:
            FolderError: it holds NaN or infinity.
        """
        entry = self.entries[name]
        if entry.file not in self._handles:
            self._handles[entry.file] = safetensors.safe_open(self.folder / entry.file, framework="pt")
        part = self._handles[entry.file].get_slice(name)[block]
        # The sum of finite numbers may overflow; that of NaN or infinity is never finite.
        if not torch.isfinite(part.sum(dtype=torch.float32)) and not torch.isfinite(part).all():
            raise FolderError(self.folder, [f"{name} in {entry.file} holds NaN or infinity; the weights are broken"])
        return part

    def read_bytes(self, name: str) -> Iterator[bytes]:
        """A tensor's bytes as they are in the file, piece by piece."""
        entry = self.entries[name]
        with (self.folder / entry.file).open("rb") as file:
            file.seek(entry.offset_bytes)
            left = entry.num_bytes
            while left:
                part = file.read(min(left, 2**24))
                left -= len(part)
                yield part

    def close(self) -> None:
        self._handles.clear()

    def _file_names(self, problems: list[str]) -> list[str]:
        present = sorted(path.name for path in self.folder.glob("model*.safetensors"))
        if (self.folder / INDEX).exists():
            named = sorted(set(self._weight_map(problems).values()))
            problems += [f"{INDEX} names {name}, which is missing" for name in named if name not in present]
            problems += [
                f"{name} is not in {INDEX}: the index belongs to other files" for name in present if name not in named
            ]
            return [name for name in named if name in present]
        if present != [SINGLE]:
            problems.append(
                f"{len(present)} shards without {INDEX}, which says what belongs together"
                if present
                else f"no {SINGLE} and no {INDEX}; weights are read from safetensors files only (never unpickled)"
            )
            return []
        return present

    def _weight_map(self, problems: list[str]) -> dict[str, str]:
        try:
            index = _strict_json((self.folder / INDEX).read_bytes())
        except _Damaged as error:
            problems.append(f"{INDEX}: {error}")
            return {}
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            problems.append(f"{INDEX}: has no weight_map of tensor names to files")
            return {}
        bad = [name for name, file in weight_map.items() if not isinstance(file, str) or Path(file).name != file]
        problems += [f"{INDEX}: {name} is in {weight_map[name]!r}, which is no file name" for name in bad]
        return {} if bad else weight_map

    def _add(self, file: str, header: dict[str, TensorEntry], problems: list[str]) -> None:
        for name, entry in header.items():
            if name in self.entries:
                problems.append(f"{name} is in {self.entries[name].file} and again in {file}")
            self.entries.setdefault(name, entry)

    def _index_problems(self) -> Iterator[str]:
        weight_map = self._weight_map([])
        for name, file in weight_map.items():
            if name not in self.entries:
                yield f"{INDEX} puts {name} into {file}, which does not hold it"
            elif self.entries[name].file != file:
                yield f"{INDEX} puts {name} into {file}; it is in {self.entries[name].file}"
        for name, entry in self.entries.items():
            if name not in weight_map:
                yield f"{name} in {entry.file} is missing in {INDEX}"


class _Damaged(Exception):
    """Why a file cannot be read, in words."""


def _strict_json(data: bytes) -> Any:
    def unique(pairs):
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise _Damaged(f"names {next(name for name in names if names.count(name) > 1)!r} twice")
        return dict(pairs)

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise _Damaged(f"is not JSON ({error})") from None


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file, whose bytes must fill it without gaps or overlaps."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
        if length is None or length > min(size - 8, _LARGEST_HEADER_BYTES):
            raise _Damaged(f"is no whole safetensors file ({size} bytes, header of {length})")
        header = _strict_json(file.read(length))
    if not isinstance(header, dict):
        raise _Damaged("has a header that is no table of tensors")
    entries = {name: _entry(path, name, fact, 8 + length) for name, fact in header.items() if name != "__metadata__"}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset_bytes, item[1].num_bytes)):
        if entry.offset_bytes != end:
            raise _Damaged(f"has a gap or overlap before {name}")
        end += entry.num_bytes
    if end != size:
        raise _Damaged(f"is cut off or too long: its header describes {end} bytes, it has {size}")
    return entries


def _entry(path: Path, name: str, fact: Any, data_begin: int) -> TensorEntry:
    def whole_numbers(value):
        return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)

    dtype, shape, offsets = (fact.get(key) if isinstance(fact, dict) else None for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not whole_numbers(shape) or not whole_numbers(offsets) or len(offsets) != 2:
        raise _Damaged(f"describes {name} as {fact!r}, without dtype, shape and data_offsets")
    if dtype not in _ITEM_BYTES:
        raise _Damaged(f"holds {name} in {dtype}; known are {', '.join(_ITEM_BYTES)}")
    entry = TensorEntry(path.name, dtype, tuple(shape), data_begin + offsets[0])
    if offsets[1] - offsets[0] != entry.num_bytes:
        raise _Damaged(f"gives {name} {offsets[1] - offsets[0]} bytes; {dtype} {shape} has {entry.num_bytes}")
    return entry


def is_weight(entry: TensorEntry) -> bool:
    return entry.dtype in _TORCH_DTYPE


class TensorFilesWriter:
    """New files with the headers of `source`'s, filled block by block, by one or more processes."""

    def __init__(self, source: TensorFiles, folder: Path):
        self.source, self.folder = source, folder
        self.written_bytes: dict[str, int] = {}
        """By tensor: bytes this process wrote."""
        self._files: dict[str, int] = {}

    def create(self) -> None:
        """Make the files at their full size (one process, before any writes)."""
        for name in self.source.files:
            path, source = self.folder / name, self.source.folder / name
            begin = min(entry.offset_bytes for entry in self.source.entries.values() if entry.file == name)
            with source.open("rb") as given, path.open("wb") as made:
                made.write(given.read(begin))
                # Takes the space now: a full disk shows before the work, not in its middle.
                os.posix_fallocate(made.fileno(), 0, source.stat().st_size)

    def write(self, name: str, block: Block, values: Tensor) -> None:
        """Write a block, in the source's dtype."""
        entry = self.source.entries[name]
        values = values.detach().to("cpu", _TORCH_DTYPE[entry.dtype]).contiguous()
        item = _ITEM_BYTES[entry.dtype]
        strides = [math.prod(entry.shape[dim + 1 :]) * item for dim in range(len(entry.shape))]
        begin = entry.offset_bytes + sum(part.start * stride for part, stride in zip(block, strides))
        whole_rows = all(part.stop - part.start == size for part, size in list(zip(block, entry.shape))[1:])
        data = memoryview(values.reshape(-1).view(torch.uint8).numpy())
        if whole_rows:
            self._write_all(entry.file, data, begin)
        else:
            row_bytes = values[0].numel() * item
            for row in range(values.shape[0]):
                self._write_all(entry.file, data[row * row_bytes : (row + 1) * row_bytes], begin + row * strides[0])
        self.written_bytes[name] = self.written_bytes.get(name, 0) + values.numel() * item

    def copy(self, name: str) -> None:
        """Write a tensor as it is in the source."""
        entry, position = self.source.entries[name], self.source.entries[name].offset_bytes
        for part in self.source.read_bytes(name):
            self._write_all(entry.file, memoryview(part), position)
            position += len(part)
        self.written_bytes[name] = entry.num_bytes

    def close(self) -> None:
        """Bring everything to the disk."""
        for file in self._files.values():
            os.fsync(file)
            os.close(file)
        self._files.clear()

    def _write_all(self, file: str, data: memoryview, offset: int) -> None:
        if file not in self._files:
            self._files[file] = os.open(self.folder / file, os.O_WRONLY)
        while data:
            count = os.pwrite(self._files[file], data, offset)
            data, offset = data[count:], offset + count

    def missing(self, written_bytes: dict[str, int]) -> list[str]:
        """Tensors whose bytes, added up over all processes, are not their size."""
        return [
            f"{name}: {written_bytes.get(name, 0)} of {entry.num_bytes} bytes were written"
            for name, entry in self.source.entries.items()
            if written_bytes.get(name, 0) != entry.num_bytes
        ]
