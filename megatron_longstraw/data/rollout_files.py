"""Rollout files: what a sampling run writes, a step at a time, and what a train-only run reads, a step at a time."""
from __future__ import annotations

import os
from pathlib import Path
from typing import Iterator, Sequence

import numpy as np
import orjson

from megatron_longstraw.data.rollout_groups import GroupOrder, format_group
from megatron_longstraw.data.rollout_rows import Limits, RolloutRow, parse_rollout_row
from megatron_longstraw.data.rows import Line, RowError, iter_lines, line_of, parse_line, show
from megatron_longstraw.data.task import Task
from megatron_longstraw.types import PromptGroup, prompt_digest

TAIL_BYTES = 2**20


class RolloutWriter:
    """Appends whole steps to a file; a run that is killed leaves at most one row cut short.

    Args:
        steps_done: a run that goes on keeps its rows of so many steps; later ones are cut off.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike, steps_done: int = 0):
        self.path = Path(path)
        end = _end_of_steps(self.path, steps_done)
        with self.path.open("ab") as file:
            file.truncate(end)

    def write(self, step: int, groups: Sequence[PromptGroup]) -> None:
        """Raises:
        ValueError: see `format_group`; nothing of the step is written.
        """
        rows = b"".join(format_group(step, group) for group in groups)
        with self.path.open("ab") as file:
            file.write(rows)


def _end_of_steps(path: Path, steps_done: int) -> int:
    """Offset behind the last whole row of the first `steps_done` steps."""
    end = 0
    if steps_done and path.exists():
        with path.open("rb") as file:
            for row in file:
                if not row.endswith(b"\n") or orjson.loads(row)["step"] >= steps_done:
                    break
                end += len(row)
    return end


class RolloutReader:
    """The groups of a rollout file with their responses, by step.

    Reads forward and holds one step. Of the steps it has come across it knows where they begin, so an earlier one
    can be asked for again.

    Args:
        task: the training prompts, if the run has any. Every group must be one of its step's, with the same ids; a group
            with a prompt_ref is found by `task.find_prompt(reference)` where the task can do that.

    Raises:
        RowError: the file cannot be read, is empty, or its last row is cut short.
    """

    def __init__(
        self, path: str | os.PathLike, max_row_bytes: int, limits: Limits = Limits(), task: Task | None = None
    ):
        self.path, self.max_row_bytes, self.limits, self.task = Path(path), max_row_bytes, limits, task
        self._starts: dict[int, tuple[int, int]] = {}
        """Step -> (offset, number) of its first row."""
        self.last_step = self._last_row_step()

    def check_steps(self, first_step: int, num_steps: int) -> None:
        """Raises:
        RowError: the file ends before these steps do.
        """
        if first_step + num_steps - 1 > self.last_step:
            raise RowError(
                f"{self.path}: the last step is {self.last_step}, the run needs steps {first_step} to "
                f"{first_step + num_steps - 1}; lower --train-iters or change --rollout-file"
            )

    def prompts(self, step: int, num_prompts: int) -> list[PromptGroup]:
        """The groups of a step, in the order of the file; equal on every rank and at every call.

        Raises:
            RowError: a row up to this step's end cannot be used, or the step has another number of groups.
        """
        groups = self._read(step, num_prompts)
        if not groups:
            raise RowError(f"{self.path}: has no rows of step {step}; need one step after the other")
        if len(groups) != num_prompts:
            raise RowError(
                f"{self.path}: step {step} has {len(groups)} groups, need {num_prompts}; change --train-batch-size"
            )
        return groups

    def _read(self, step: int, num_prompts: int) -> list[PromptGroup]:
        groups: list[PromptGroup] = []
        trains = _TrainingPrompts(self.task, step, num_prompts)
        known = [start for number, start in self._starts.items() if number <= step]
        for line, row, begins in self._rows(*max(known, default=(0, 1))):
            self._starts.setdefault(row.step, (line.offset, line.number))
            if row.step > step:
                break
            if row.step < step:
                continue
            if begins:
                try:
                    groups.append(row.to_group(trains.ids_of(row)))
                except RowError as error:
                    raise self._error(line.number, error) from None
            groups[-1].branches.append(row.to_branch())
        return groups

    def _rows(self, offset: int, number: int) -> Iterator[tuple[Line, RolloutRow, bool]]:
        """Checked rows from there on, each with its line and whether it begins a group."""
        order = GroupOrder()
        for line in iter_lines(self.path, self.max_row_bytes, offset, number):
            try:
                row = parse_rollout_row(parse_line(line), self.limits)
                begins = order.follow(row)
            except RowError as error:
                raise self._error(line.number, error) from None
            number = line.number
            yield line, row, begins
        try:
            order.finish()
        except RowError as error:
            raise self._error(number, error) from None

    def _error(self, number: int, error: RowError) -> RowError:
        return RowError(f"{self.path}: row {number}: {error}")

    def _last_row_step(self) -> int:
        """Looked at before anything runs, because a run that was killed leaves its last row cut short."""
        try:
            text = _tail(self.path, self.max_row_bytes)
        except OSError as error:
            raise RowError(f"{self.path}: cannot be read ({error.strerror}); change --rollout-file") from None
        if not text:
            raise RowError(f"{self.path}: is empty; need a row per response; change --rollout-file")
        try:
            return parse_rollout_row(parse_line(line_of(text, self.max_row_bytes))).step
        except RowError as error:
            # Counting lines takes a pass over the file, which only this message is worth.
            number = sum(1 for _ in iter_lines(self.path, self.max_row_bytes))
            raise self._error(number, error) from None


def _tail(path: Path, max_row_bytes: int) -> bytes:
    """The last line with its newline, if any; of a longer one than the limit its last bytes."""
    with path.open("rb") as file:
        end = begin = file.seek(0, os.SEEK_END)
        text = b""
        while begin and b"\n" not in text[:-1] and len(text) <= max_row_bytes + 1:
            begin = max(0, end - max(TAIL_BYTES, 2 * len(text)))
            file.seek(begin)
            text = file.read(end - begin)
    return text[text[:-1].rfind(b"\n") + 1 :]


class _TrainingPrompts:
    """The prompts that a step trains on, for groups that were sampled earlier."""

    def __init__(self, task: Task | None, step: int, num_prompts: int):
        self.task, self.step, self.num_prompts = task, step, num_prompts
        self._by_group: dict[int | str, np.ndarray] | None = None

    def ids_of(self, row: RolloutRow) -> np.ndarray:
        """The prompt of the group that the row begins.

        Raises:
            RowError: there is none, or another than the responses were sampled from.
        """
        name = f"group {show(row.group_id)} of step {row.step}"
        if self.task is None:
            if row.prompt_ids is None:
                raise RowError(f"{name} refers to a prompt of another file; need it in --train-files, or prompt_ids")
            return row.prompt_ids
        ids = self._find(row)
        if ids is None:
            raise RowError(
                f"{name} is none of the step's training prompts; train on the file alone (without --train-files and "
                f"--prompt-function), or with the seed, files and batch size that it was sampled with"
            )
        if prompt_digest(ids) != row.prompt_digest:
            raise RowError(
                f"{name} was sampled from another prompt than the one that trains ({row.num_prompt_tokens} and {len(ids)} "
                f"tokens, digest {row.prompt_digest} and {prompt_digest(ids)}); use the tokenizer, template, truncation "
                f"and limits of the sampling run"
            )
        return ids

    def _find(self, row: RolloutRow) -> np.ndarray | None:
        if row.prompt_ref is not None and hasattr(self.task, "find_prompt"):
            return self.task.find_prompt(row.prompt_ref)
        if self._by_group is None:
            groups = self.task.prompts(self.step, self.num_prompts)
            self._by_group = {group.group_id: group.prompt_ids for group in groups}
        return self._by_group.get(row.group_id)
