"""Rows of a rollout file as groups: what each row must be after the rows before it, and a group back to rows."""
from __future__ import annotations

import operator
from typing import Any

import numpy as np
import orjson

from megatron_longstraw.data.rollout_rows import FACTS, RolloutRow
from megatron_longstraw.data.rows import RowError, show
from megatron_longstraw.types import PromptGroup, prompt_digest


class GroupOrder:
    """What the rows seen so far ask of the next one. One object per pass over a file, fed in its order."""

    def __init__(self):
        self.step = -1
        self.group_id: int | str | None = None
        self.num_rows = 0
        """Rows of the current group."""
        self.num_groups = 0
        """Groups of the current step."""
        self.num_prompt_tokens: int | None = None
        self._group_size: int | None = None
        self._digest: str | None = None
        self._facts: dict[str, Any] = {}
        self._rewards: dict[int | str, float | None] = {}
        self._seen: set[int | str] = set()

    def follow(self, row: RolloutRow) -> bool:
        """Take the next row; whether it begins a group. A row that is refused is taken all the same, so that the rows
        after it are judged by what they are.

        Raises:
            RowError: the row cannot come here.
        """
        if row.step < self.step:
            raise RowError(f"{_name(row)}: comes after rows of step {self.step}; need rows in the order of their steps")
        begins = (row.step, row.group_id) != (self.step, self.group_id)
        problem = self._begin(row) if begins else self._go_on(row)
        self.num_rows = row.branch + 1
        problem = problem or self._trajectory_problem(row)
        if problem is not None:
            raise RowError(f"{_name(row)}: {problem}")
        return begins

    def skip(self, row: dict[str, Any]) -> None:
        """Count a row that is wrong in itself, so that the rows after it are not blamed for it."""
        step, group_id, branch = row.get("step"), row.get("group_id"), row.get("branch")
        if type(step) is not int or step < self.step or type(group_id) not in (int, str) or type(branch) is not int:
            return
        if (step, group_id) != (self.step, self.group_id):
            self._start(step, group_id)
        self.num_rows = branch + 1

    def finish(self) -> None:
        """After the last row.

        Raises:
            RowError: its group has fewer rows than it says.
        """
        problem = self._missing_rows()
        if problem is not None:
            raise RowError(problem)

    def _begin(self, row: RolloutRow) -> str | None:
        missing = self._missing_rows()
        problem = missing and f"before it, {missing}"
        again = row.step == self.step and row.group_id in self._seen
        self._start(row.step, row.group_id)
        self._digest, self._facts, self._group_size = row.prompt_digest, row.facts, row.group_size
        self.num_prompt_tokens = row.num_prompt_tokens
        if problem is not None:
            return problem
        if again:
            return "rows of the group came before rows of another; need the rows of a group next to each other"
        if row.branch != 0:
            return (
                f"the first row of the group has branch {row.branch}; need branches counted from 0, and all rows of a "
                f"group next to each other in one step"
            )
        if row.num_prompt_tokens is None:
            return "the first row of the group has neither prompt_ids nor prompt_ref; need one of them"
        return None

    def _go_on(self, row: RolloutRow) -> str | None:
        if row.branch < self.num_rows:
            return (
                f"the group has a row of branch {row.branch} already; need one row per response (what the policy did "
                f"not write in it has loss_mask 0)"
            )
        if row.branch > self.num_rows:
            return f"comes after branch {self.num_rows - 1}; need branches counted from 0 without a gap"
        if self._group_size is not None and row.branch >= self._group_size:
            return f"group_size is {self._group_size} in the group's first row; need no more rows or another group_size"
        if row.prompt_digest is None:
            return "has neither prompt_digest nor prompt_ids; need one, to tell that its prompt is the group's"
        if self._digest not in (None, row.prompt_digest):
            return (
                f"the prompt's digest is {show(row.prompt_digest)}, in the group's first row {show(self._digest)}: "
                f"the response was sampled from another prompt"
            )
        for name, value in row.facts.items():
            if value != self._facts.get(name):
                first = show(self._facts.get(name))
                return f"{name} is {show(value)}, in the group's first row {first}; need one for all"
        return None

    def _trajectory_problem(self, row: RolloutRow) -> str | None:
        if row.trajectory is None:
            return None
        first = self._rewards.setdefault(row.trajectory, row.reward)
        if row.reward == first:
            return None
        return (
            f"reward is {show(row.reward)}, in the first row of trajectory {show(row.trajectory)} {show(first)}; "
            f"need one reward for a trajectory"
        )

    def _start(self, step: int, group_id: int | str) -> None:
        if step != self.step:
            self._seen, self.num_groups = set(), 0
        self.step, self.group_id = step, group_id
        self._seen.add(group_id)
        self.num_groups += 1
        self.num_rows, self.num_prompt_tokens = 0, None
        self._group_size, self._digest, self._facts, self._rewards = None, None, {}, {}

    def _missing_rows(self) -> str | None:
        if self._group_size is None or self.num_rows >= self._group_size:
            return None
        return (
            f"group {show(self.group_id)} of step {self.step} ends after {self.num_rows} of {self._group_size} "
            f"rows; need all of them (or another group_size): delete the rows of a step that is not whole"
        )


def _name(row: RolloutRow) -> str:
    return f"step {row.step}, group {show(row.group_id)}, branch {row.branch}"


def format_group(step: int, group: PromptGroup) -> bytes:
    """The group's rows as JSONL. Ids, rewards (float64) and log-probs (float32) are read back bit for bit.

    Raises:
        ValueError: JSON has no form for the ground truth or extra_info, or the loss mask is not 0 and 1.
    """
    digest = prompt_digest(group.prompt_ids)
    rows = []
    for index, branch in enumerate(group.branches):
        row = {"step": step, "group_id": _plain(group.group_id), "branch": index}
        if index == 0:
            row["group_size"] = len(group.branches)
            row["prompt_ids"] = np.ascontiguousarray(group.prompt_ids)
        row["prompt_digest"] = digest
        row["response_ids"] = np.ascontiguousarray(branch.response_ids)
        # As float64, because the shortest text of a float32 read as float64 and rounded is not always the same float32.
        logprobs = branch.rollout_logprobs
        row["response_logprobs"] = None if logprobs is None else logprobs.astype(np.float64)
        if not (branch.loss_mask == 1).all():
            row["loss_mask"] = _mask(branch.loss_mask, group.group_id, index)
        row |= {"reward": branch.reward, "finish_reason": branch.finish_reason}
        if branch.rewards:
            row["rewards"] = branch.rewards
        if branch.reward_failed:
            row["reward_failed"] = True
        if branch.trajectory is not None:
            row["trajectory"] = _plain(branch.trajectory)
        if index == 0:
            row |= {name: getattr(group, name) for name in FACTS}
        rows.append(_dump(row, group.group_id))
    return b"".join(rows)


def _plain(name: Any) -> int | str:
    return name if isinstance(name, str) else operator.index(name)


def _mask(mask: np.ndarray, group_id: int | str, index: int) -> np.ndarray:
    if not np.isin(mask, (0, 1)).all():
        raise ValueError(f"loss_mask of group {group_id!r}, branch {index} is not 0 and 1; rollout files hold no other")
    return mask.astype(np.int8)


def _dump(row: dict[str, Any], group_id: int | str) -> bytes:
    try:
        return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
    except orjson.JSONEncodeError as error:
        raise ValueError(
            f"group {group_id!r} cannot be written to a rollout file: {error}; need a ground truth and extra_info that "
            f"JSON has a form for, or --no-save-rollouts"
        ) from None
