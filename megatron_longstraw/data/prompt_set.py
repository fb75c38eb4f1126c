"""The prompts of several files as one set: every row checked once, any row found again by its place."""
from __future__ import annotations

import dataclasses
import os
from array import array
from typing import Any, Iterator, Sequence

import numpy as np

from megatron_longstraw.config import ConfigError, DataConfig
from megatron_longstraw.data.prompt_files import PromptFileError, Rows, open_rows
from megatron_longstraw.data.prompt_rows import PromptRow, columns, missing_columns, parse_prompt_row
from megatron_longstraw.data.rows import RowError

SHOWN_PROBLEMS = 20


class PromptSet:
    """The checked prompts of several files, by their place in all of them together.

    Opening reads every row once, so that whatever is wrong is said before anything runs.

    Raises:
        ConfigError: files or rows that cannot be used, or ids that occur twice; up to 20 of them, and how many more.
    """

    def __init__(self, paths: Sequence[str | os.PathLike], keys: DataConfig):
        self.keys = keys
        self.first_chat: int | None = None
        """Place of the first prompt that is messages."""
        self._files: list[Rows] = []
        self._starts = [0]
        self._problems, self._num_problems = [], 0
        self._places, self._id_hashes = array("q"), array("q")  # of the rows that can be used
        for path in paths:
            self._add(path)
        if len(self._files) == len(paths):
            self._find_duplicates()
        del self._places, self._id_hashes
        if self._num_problems > len(self._problems):
            self._problems.append(f"and {self._num_problems - len(self._problems)} more")
        if self._problems:
            raise ConfigError(self._problems)

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[PromptRow]:
        for rows, start in zip(self._files, self._starts):
            for index, row in enumerate(rows.scan()):
                yield self._parse(rows, start, index, row)

    def rows(self, indices: Sequence[int]) -> list[PromptRow]:
        """The prompts at these places.

        Raises:
            PromptFileError: a file was changed since it was opened.
        """
        found: dict[int, PromptRow] = {}
        for rows, start, end in zip(self._files, self._starts, self._starts[1:]):
            own = sorted({int(index) - start for index in indices if start <= index < end})
            for index, row in zip(own, rows.read(own) if own else ()):
                found[start + index] = self._parse(rows, start, index, row)
        return [found[int(index)] for index in indices]

    def where(self, index: int) -> str:
        """File and row number of a place, for messages."""
        number = np.searchsorted(self._starts, index, side="right") - 1
        return f"{self._files[number].path}: row {index - self._starts[number] + 1}"

    def _parse(self, rows: Rows, start: int, index: int, row: Any) -> PromptRow:
        if isinstance(row, RowError):
            raise RowError(f"{rows.path}: {row}")
        try:
            parsed = parse_prompt_row(row, self.keys, index + 1)
        except RowError as error:
            raise RowError(f"{rows.path}: {error}") from None
        if self.keys.id_key in row:
            return parsed
        return dataclasses.replace(parsed, id=str(start + index + 1))  # row numbers of two files are the same

    def _add(self, path: str | os.PathLike) -> None:
        start, count = self._starts[-1], 0
        try:
            rows = open_rows(path, self.keys.max_row_bytes, columns(self.keys))
            problem = None if rows.columns is None else missing_columns(rows.columns, self.keys)
            if problem is not None:
                raise PromptFileError(f"{path}: {problem}")
            for count, row in enumerate(rows.scan(), 1):
                try:
                    parsed = self._parse(rows, start, count - 1, row)
                except RowError as error:
                    self._report(str(error))
                    continue
                self._places.append(start + count - 1)
                self._id_hashes.append(hash(parsed.id))
                if self.first_chat is None and isinstance(parsed.prompt, list):
                    self.first_chat = start + count - 1
        except PromptFileError as error:
            self._report(str(error))
            return
        self._files.append(rows)
        self._starts.append(start + count)

    def _find_duplicates(self) -> None:
        """Rows of equal hash are read again, since different ids may share one."""
        places, hashes = (np.array(column, dtype=np.int64) for column in (self._places, self._id_hashes))
        order = np.argsort(hashes, kind="stable")
        pairs = np.stack([order[:-1], order[1:]], axis=1)[np.diff(hashes[order]) == 0]
        for earlier, later in places[pairs[np.argsort(pairs[:, 1])]].tolist():
            if len(self._problems) == SHOWN_PROBLEMS:
                self._num_problems += 1
                continue
            first, second = self.rows([earlier, later])
            if first.id == second.id:
                self._report(
                    f"{self.where(later)} (id {second.id!r}): the same id as {self.where(earlier)}; "
                    f"need ids of their own; change --id-key or the row"
                )

    def _report(self, problem: str) -> None:
        self._num_problems += 1
        if len(self._problems) < SHOWN_PROBLEMS:
            self._problems.append(problem)
