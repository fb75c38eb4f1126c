"""Rows of a JSONL file, one at a time: a file is never held in memory, and a row only up to a limit."""
from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import orjson

SKIP_BYTES = 2**20
"""Of a row above the limit this much is read at once, to find its end."""
SHOWN_CHARACTERS = 60


class RowError(ValueError):
    """A row cannot be used. One line: what it holds and what is needed; with file, row number and ids once known."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file."""

    number: int
    """Counted from 1."""
    offset: int
    """Bytes before it in the file."""
    text: bytes
    """With its newline; cut at the limit when it is longer (see `is_cut`)."""
    is_cut: bool


def line_of(text: bytes, max_row_bytes: int, number: int = 1, offset: int = 0) -> Line:
    """A line of at least this text: all of it, or more than the limit."""
    text = text[: max_row_bytes + 1]
    return Line(number, offset, text, len(text) > max_row_bytes and not text.endswith(b"\n"))


def iter_lines(path: str | os.PathLike, max_row_bytes: int, offset: int = 0, number: int = 1) -> Iterator[Line]:
    """The lines of a file from line `number` on, which begins at `offset`.

    Raises:
        OSError: the file cannot be read.
    """
    with Path(path).open("rb", buffering=SKIP_BYTES) as file:
        file.seek(offset)
        while text := file.readline(max_row_bytes + 1):
            line = line_of(text, max_row_bytes, number, offset)
            yield line
            offset, number = offset + len(text), number + 1
            while line.is_cut and not text.endswith(b"\n") and (text := file.readline(SKIP_BYTES)):
                offset += len(text)


def parse_line(line: Line) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        RowError: the line is above the limit, not UTF-8, not JSON, or no object.
    """
    if line.is_cut:
        raise RowError(f"has more than {len(line.text) - 1} bytes; shorten it or raise --max-row-bytes")
    try:
        row = orjson.loads(line.text)
    except orjson.JSONDecodeError as error:
        raise RowError(_why_not_json(line.text, error)) from None
    if type(row) is not dict:
        raise RowError(f"is {show(row)}; need a JSON object")
    return row


def show(value: Any) -> str:
    """A value for a message: one line, not too long."""
    if value is None:
        return "null"
    # Lists may hold millions of entries, of which a few are shown.
    text = repr(value[:20] if isinstance(value, (list, str)) and len(value) > SHOWN_CHARACTERS else value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def _why_not_json(text: bytes, error: orjson.JSONDecodeError) -> str:
    if not text.strip():
        return "is empty; need a JSON object on every line: delete the line"
    try:
        text.decode()
    except UnicodeDecodeError as bad:
        return f"is not UTF-8 (byte 0x{text[bad.start]:02x} at byte {bad.start + 1}); save the file as UTF-8"
    number = re.match(r"-?(NaN|Infinity|inf)", error.doc[error.pos :]) if isinstance(error.doc, str) else None
    if number:
        return f"holds {number[0]} at character {error.pos + 1}, which is no JSON number; need a finite number or null"
    if not text.endswith(b"\n"):
        return f"ends in the middle ({error.msg}): a row that was not written whole; delete the line"
    return f"is not JSON ({error.msg} at character {error.pos + 1})"
