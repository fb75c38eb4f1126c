"""Rows of JSONL and Parquet files, one at a time: a file is never held in memory, however large it is."""
from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any, Iterator, Protocol, Sequence

import numpy as np

from megatron_longstraw.data.rows import Line, RowError, iter_lines, line_of, parse_line

BATCH_BYTES = 2**24
"""About this much of a Parquet file is decoded at once."""
BATCH_ROWS = 64
READ_BYTES = 2**20


class PromptFileError(ValueError):
    """A file cannot be read as a whole; the message is one line that begins with its path."""


class Rows(Protocol):
    """The rows of one file."""

    columns: Sequence[str] | None
    """Names of its columns, where the file has a schema."""

    def __len__(self) -> int:
        """Number of rows; known after the first `scan`."""

    def scan(self) -> Iterator[Any]:
        """All rows in order, unchecked; a `RowError` in place of one that cannot be read.

        Raises:
            PromptFileError: the rest cannot be read.
        """

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Rows by their 0-based place, after a whole `scan`.

        Raises:
            PromptFileError: the file was changed since it was opened.
        """


def open_rows(path: str | os.PathLike, max_row_bytes: int, only: Sequence[str] | None = None) -> Rows:
    """The rows of a .jsonl or .parquet file.

    Args:
        max_row_bytes: larger rows are errors and are not kept in memory.
        only: columns to read of a Parquet file, those that it has; None: all.

    Raises:
        PromptFileError: the file cannot be opened, is empty, or is neither.
    """
    path = Path(path)
    kinds = {".jsonl": JsonlRows, ".parquet": ParquetRows}
    if path.suffix.lower() not in kinds:
        raise PromptFileError(f"{path}: need a .jsonl file (one JSON object a line) or a .parquet file")
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise PromptFileError(f"{path}: cannot be read ({error.strerror})") from error
    if not start:
        raise PromptFileError(f"{path}: the file is empty")
    if start == b"PAR1" and path.suffix.lower() == ".jsonl":
        raise PromptFileError(f"{path}: is a Parquet file; name it .parquet")
    return kinds[path.suffix.lower()](path, max_row_bytes, only)


def iter_rows(path: str | os.PathLike, max_row_bytes: int) -> Iterator[tuple[int, Any]]:
    """(1-based number, row as read) of a file, or (number, RowError) of a row that cannot be read.

    Raises:
        PromptFileError: the file cannot be read, or not to its end.
    """
    return enumerate(open_rows(path, max_row_bytes).scan(), 1)


class JsonlRows:
    """One JSON object a line; what is kept is where each line begins (8 bytes a row)."""

    columns = None

    def __init__(self, path: Path, max_row_bytes: int, only: Sequence[str] | None = None):
        self.path, self.max_row_bytes = path, max_row_bytes
        self._stamp = _stamp(path)
        self._offsets = array("q")

    def __len__(self) -> int:
        return len(self._offsets)

    def scan(self) -> Iterator[Any]:
        offsets = array("q")
        for line in iter_lines(self.path, self.max_row_bytes):
            offsets.append(line.offset)
            yield self._parse(line)
        self._offsets = offsets

    def read(self, indices: Sequence[int]) -> list[Any]:
        _check_unchanged(self.path, self._stamp)
        rows = []
        with self.path.open("rb") as file:
            for index in indices:
                file.seek(self._offsets[index])
                rows.append(self._parse(line_of(file.readline(), self.max_row_bytes, index + 1)))
        return rows

    @staticmethod
    def _parse(line: Line) -> Any:
        try:
            return parse_line(line)
        except RowError as error:
            return RowError(f"row {line.number}: {error}")


class ParquetRows:
    """Rows of a Parquet file, decoded page by page. Rows are read by decoding their row groups from the beginning, so
    large files should have row groups of some hundred megabytes at most."""

    def __init__(self, path: Path, max_row_bytes: int, only: Sequence[str] | None = None):
        self.path, self.max_row_bytes = path, max_row_bytes
        self._stamp = _stamp(path)
        self._metadata = None
        with self._open() as file:
            self._metadata = file.metadata
            self.columns = file.schema_arrow.names
        if len(self) == 0:
            raise PromptFileError(f"{path}: the file has no rows")
        self._only = None if only is None else [name for name in self.columns if name in only]
        sizes = [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return self._metadata.num_rows

    def scan(self) -> Iterator[Any]:
        for group in range(self._metadata.num_row_groups):
            for begin, batch in self._batches(group):
                try:
                    rows = batch.to_pylist() if batch.nbytes <= self.max_row_bytes else None
                except ValueError:
                    rows = None  # one of them cannot be read
                yield from rows or [self._row(batch, begin, begin + i) for i in range(batch.num_rows)]

    def read(self, indices: Sequence[int]) -> list[Any]:
        _check_unchanged(self.path, self._stamp)
        rows: dict[int, Any] = {}
        groups = np.searchsorted(self._starts, indices, side="right") - 1
        for group in np.unique(groups).tolist():
            wanted = sorted({index for index, own in zip(indices, groups) if own == group}, reverse=True)
            for begin, batch in self._batches(group):
                while wanted and wanted[-1] < begin + batch.num_rows:
                    index = wanted.pop()
                    rows[index] = self._row(batch, begin, index)
                if not wanted:
                    break
        return [rows[index] for index in indices]

    def _open(self):
        import pyarrow
        from pyarrow import parquet

        try:
            # Otherwise a whole column of a row group is read at once.
            streamed = {"pre_buffer": False, "buffer_size": READ_BYTES}
            return parquet.ParquetFile(self.path, metadata=self._metadata, page_checksum_verification=True, **streamed)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise self._broken(error) from error

    def _batches(self, group: int) -> Iterator[tuple[int, Any]]:
        """(0-based place of its first row, record batch) of a row group."""
        import pyarrow

        facts = self._metadata.row_group(group)
        num_rows = BATCH_BYTES // max(1, facts.total_byte_size // max(1, facts.num_rows))
        begin = int(self._starts[group])
        with self._open() as file:
            try:
                for batch in file.iter_batches(
                    max(1, min(num_rows, BATCH_ROWS)), row_groups=[group], columns=self._only, use_threads=False
                ):
                    yield begin, batch
                    begin += batch.num_rows
            except (pyarrow.ArrowException, OSError, ValueError) as error:
                raise self._broken(error, f" after row {begin}") from error

    def _row(self, batch: Any, begin: int, index: int) -> Any:
        row = batch.slice(index - begin, 1)
        if row.nbytes > self.max_row_bytes:
            return RowError(_too_large(index + 1, self.max_row_bytes))
        try:
            return row.to_pylist()[0]
        except ValueError as error:
            return RowError(f"row {index + 1}: cannot be read ({_one_line(error)})")

    def _broken(self, error: BaseException, where: str = "") -> PromptFileError:
        return PromptFileError(f"{self.path}: is not a whole Parquet file, cannot be read{where} ({_one_line(error)})")


def _too_large(number: int, max_row_bytes: int) -> str:
    return f"row {number}: has more than {max_row_bytes} bytes; shorten it or raise --max-row-bytes"


def _stamp(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns


def _check_unchanged(path: Path, stamp: tuple[int, int]) -> None:
    try:
        unchanged = _stamp(path) == stamp
    except OSError:
        unchanged = False
    if not unchanged:
        raise PromptFileError(f"{path}: was changed since the run began; its rows would no longer be the same prompts")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
