"""One row of a rollout file: from its JSON object to a checked `RolloutRow`.

One response a row; rows of a group are adjacent and in one step, branches counted from 0:

    step, group_id, branch     where it belongs
    group_size                 rows of the group (its first row; optional)
    prompt_ids                 token ids (first row of a group), or
    prompt_ref                 {file, row or id, num_tokens, digest}: the prompt is that row of a prompt file
    prompt_digest              stands for the prompt's ids in the other rows (types.prompt_digest)
    response_ids               exactly the ids that were sampled; may be empty
    response_logprobs          one per response token, under the distribution it was sampled from, or null
    loss_mask                  one 0 or 1 per RESPONSE token: 0 where the policy did not write it; absent: all 1
    reward                     a number, or null: no score
    rewards                    {name: number}: what else the reward function returned (optional)
    reward_failed              true: it raised or returned no number; the reward is what that was taken for (optional)
    finish_reason              stop, length or null
    trajectory                 rows of a group with one trajectory count once in its statistics (optional)
    data_source, ground_truth, extra_info    facts of the prompt (first row of a group; optional)
"""
from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_longstraw.config import Config
from megatron_longstraw.data.rows import RowError, show
from megatron_longstraw.types import LARGEST_REWARD, Branch, PromptGroup, prompt_digest

KEYS = (
    "step", "group_id", "branch", "group_size", "prompt_ids", "prompt_ref", "prompt_digest", "response_ids",
    "response_logprobs", "loss_mask", "reward", "rewards", "reward_failed", "finish_reason", "trajectory", "data_source",
    "ground_truth", "extra_info",
)  # fmt: skip
ONLY_ROLLOUTS = {"group_id", "branch", "response_ids", "response_logprobs", "loss_mask", "prompt_digest"}
"""Keys that no prompt file has."""
LARGEST_LOGPROB = 1e-3
"""Above 0 by no more than rounding."""
FACTS = ("data_source", "ground_truth", "extra_info")


@dataclass(frozen=True)
class Limits:
    """What a run accepts; None: not checked."""

    vocab_size: int | None = None
    max_prompt_length: int | None = None
    max_response_length: int | None = None

    @classmethod
    def of(cls, config: Config) -> Limits:
        return cls(config.model.vocab_size, config.rollout.max_prompt_length, config.rollout.max_response_length)


@dataclass(slots=True)
class RolloutRow:
    """A row that is right in itself. Responses stay the lists that JSON gave: some readers only count them."""

    step: int
    group_id: int | str
    branch: int
    group_size: int | None
    prompt_ids: np.ndarray | None
    prompt_ref: dict[str, Any] | None
    num_prompt_tokens: int | None
    """None: neither ids nor a reference in this row."""
    prompt_digest: str | None
    response_ids: list[int]
    response_logprobs: list[float] | None
    loss_mask: list[int] | None
    reward: float | None
    rewards: dict[str, float]
    reward_failed: bool
    finish_reason: str | None
    trajectory: int | str | None
    facts: dict[str, Any]

    def to_branch(self) -> Branch:
        return Branch(
            np.array(self.response_ids, dtype=np.int64),
            loss_mask=self.loss_mask,
            reward=self.reward,
            rollout_logprobs=self.response_logprobs,
            finish_reason=self.finish_reason,
            rewards=self.rewards,
            reward_failed=self.reward_failed,
            trajectory=self.trajectory,
        )

    def to_group(self, prompt_ids: np.ndarray) -> PromptGroup:
        """The group that this row begins, without branches."""
        facts = {name: value for name, value in self.facts.items() if value is not None}
        return PromptGroup(prompt_ids, group_id=self.group_id, **facts)


def parse_rollout_row(row: dict[str, Any], limits: Limits = Limits()) -> RolloutRow:
    """Check a row for itself; `GroupOrder` checks it after the rows before it.

    Raises:
        RowError: for the first thing that is wrong, with step, group and branch where the row names them.
    """
    try:
        return _parse(row, limits)
    except RowError as error:
        name = name_of(row)
        raise RowError(f"{name}: {error}" if name else str(error)) from None


def name_of(row: dict[str, Any]) -> str:
    """Step, group and branch of a row for messages, as far as it has them."""
    parts = (("step", "step"), ("group", "group_id"), ("branch", "branch"))
    return ", ".join(f"{word} {show(row[key])}" for word, key in parts if key in row)


def _parse(row: dict[str, Any], limits: Limits) -> RolloutRow:
    if not row.keys() <= _KEYS:
        raise RowError(_unknown_key(row))
    step, branch = _count(row, "step"), _count(row, "branch")
    group_id = _group_id(row)
    prompt_ids, num_prompt_tokens, digest = _prompt(row, limits)
    response_ids = row.get("response_ids")
    check_ids(response_ids, "response_ids", limits.vocab_size)
    num_tokens = len(response_ids)
    if limits.max_response_length is not None and num_tokens > limits.max_response_length:
        raise RowError(
            f"the response has {num_tokens} tokens; the limit is {limits.max_response_length}: "
            f"shorten it or raise --max-response-length"
        )
    logprobs, mask = row.get("response_logprobs"), row.get("loss_mask")
    if logprobs is not None:
        _check_logprobs(logprobs, num_tokens)
    if mask is not None:
        _check_mask(mask, num_tokens, num_prompt_tokens)
    finish_reason = row.get("finish_reason")
    if finish_reason not in (None, "stop", "length"):
        raise RowError(f"finish_reason is {show(finish_reason)}; need stop, length or null")
    if "reward" not in row:
        raise RowError("reward is missing; need a number, or null for a response without a score")
    reward_failed = row.get("reward_failed", False)
    if type(reward_failed) is not bool:
        raise RowError(f"reward_failed is {show(reward_failed)}; need true or false")
    return RolloutRow(
        step,
        group_id,
        branch,
        _count(row, "group_size", 1) if row.get("group_size") is not None else None,
        prompt_ids,
        row.get("prompt_ref"),
        num_prompt_tokens,
        digest,
        response_ids,
        logprobs,
        mask,
        None if row["reward"] is None else _reward(row["reward"], "reward"),
        _rewards(row.get("rewards")),
        reward_failed,
        finish_reason,
        _trajectory(row.get("trajectory")),
        _facts(row),
    )


_KEYS = frozenset(KEYS)


def _unknown_key(row: dict[str, Any]) -> str:
    key = next(key for key in row if key not in _KEYS)
    close = difflib.get_close_matches(key, KEYS, n=1)
    hint = f"did you mean {close[0]}?" if close else "what else is known of a prompt goes into extra_info"
    return f"unknown key {show(key)}; {hint}"


def _count(row: dict[str, Any], key: str, least: int = 0) -> int:
    value = row.get(key)
    if type(value) is not int or not least <= value < 2**63:
        what = show(value) if key in row else "missing"
        raise RowError(f"{key} is {what}; need a whole number from {least} on")
    return value


def _group_id(row: dict[str, Any]) -> int | str:
    value = row.get("group_id")
    if type(value) is not int and (type(value) is not str or not value):
        what = show(value) if "group_id" in row else "missing"
        raise RowError(f"group_id is {what}; need a whole number or a text that names the prompt's group")
    return value


def check_ids(ids: Any, name: str, vocab_size: int | None = None) -> None:
    """Refuse what is no list of token ids.

    Raises:
        RowError: names the first entry that is none.
    """
    if type(ids) is not list:
        raise RowError(f"{name} is {show(ids)}; need a list of token ids")
    if not ids:
        return
    end = 2**63 if vocab_size is None else vocab_size
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < end:
        return
    place = next(i for i, token in enumerate(ids) if type(token) is not int or not 0 <= token < end)
    if type(ids[place]) is int and ids[place] >= end:
        raise RowError(
            f"{name} holds id {ids[place]} at position {place}; ids must be in 0..{end - 1}: "
            f"use the model's tokenizer or change --vocab-size"
        )
    raise RowError(f"{name} holds {show(ids[place])} at position {place}; need whole numbers from 0 on")


def _prompt(row: dict[str, Any], limits: Limits) -> tuple[np.ndarray | None, int | None, str | None]:
    """(ids, number of tokens, digest) as far as the row holds them."""
    ids, reference, digest = row.get("prompt_ids"), row.get("prompt_ref"), row.get("prompt_digest")
    if digest is not None and (type(digest) is not str or not digest):
        raise RowError(f"prompt_digest is {show(digest)}; need a text (types.prompt_digest of the prompt's ids)")
    if ids is not None and reference is not None:
        raise RowError("got prompt_ids and prompt_ref; need one of them")
    num_tokens = None
    if ids is not None:
        check_ids(ids, "prompt_ids", limits.vocab_size)
        if not ids:
            raise RowError("prompt_ids is empty; need at least one token")
        ids = np.array(ids, dtype=np.int64)
        num_tokens, own = len(ids), prompt_digest(ids)
        if digest not in (None, own):
            raise RowError(
                f"prompt_digest is {show(digest)}, but that of prompt_ids is {own!r}: the response was sampled from "
                f"another prompt (truncated or tokenized otherwise)"
            )
        digest = own
    elif reference is not None:
        num_tokens, own = _reference(reference)
        if digest not in (None, own):
            raise RowError(f"prompt_digest is {show(digest)}, but that of prompt_ref is {own!r}; need one prompt")
        digest = own
    if num_tokens is not None and limits.max_prompt_length is not None and num_tokens > limits.max_prompt_length:
        raise RowError(
            f"the prompt has {num_tokens} tokens; the limit is {limits.max_prompt_length}: "
            f"shorten it or raise --max-prompt-length"
        )
    return ids, num_tokens, digest


def _reference(reference: Any) -> tuple[int, str]:
    """(number of tokens, digest) of a prompt that another file holds."""
    needs = "need {file, row or id, num_tokens, digest}"
    if type(reference) is not dict:
        raise RowError(f"prompt_ref is {show(reference)}; {needs}")
    kinds = {"file": (str,), "row": (int,), "id": (int, str), "num_tokens": (int,), "digest": (str,)}
    for key, value in reference.items():
        if key not in kinds or type(value) not in kinds[key] or value == "":
            raise RowError(f"prompt_ref has {show(key)}: {show(value)}; {needs}")
    if not {"file", "num_tokens", "digest"} <= reference.keys() or not reference.keys() & {"row", "id"}:
        raise RowError(f"prompt_ref has only {', '.join(sorted(reference)) or 'nothing'}; {needs}")
    if min(reference["num_tokens"], reference.get("row", 1)) < 1:
        raise RowError(f"prompt_ref is {show(reference)}; need a row counted from 1 and at least one token")
    return reference["num_tokens"], reference["digest"]


def _check_logprobs(values: Any, num_tokens: int) -> None:
    name = "response_logprobs"
    if type(values) is not list:
        raise RowError(f"{name} is {show(values)}; need a list of numbers, or null")
    if not set(map(type, values)) <= {float, int}:
        place = next(i for i, value in enumerate(values) if type(value) not in (float, int))
        raise RowError(f"{name} holds {show(values[place])} at position {place}; need numbers")
    if len(values) != num_tokens:
        raise RowError(
            f"{name} has {len(values)} entries for a response of {num_tokens} tokens; need one per response token (a "
            f"missing one is not 0.0), or null for all"
        )
    if values and not (min(values) >= -_LARGEST_FLOAT32 and max(values) <= LARGEST_LOGPROB):
        place = next(i for i, x in enumerate(values) if not -_LARGEST_FLOAT32 <= x <= LARGEST_LOGPROB)
        raise RowError(f"{name} holds {show(values[place])} at position {place}; need a finite number, at most 0")


_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def _check_mask(mask: Any, num_tokens: int, num_prompt_tokens: int | None) -> None:
    if type(mask) is not list:
        raise RowError(f"loss_mask is {show(mask)}; need a list of 0 and 1, or none for all 1")
    if not (set(map(type, mask)) <= {int} and set(mask) <= {0, 1}):
        place = next(i for i, value in enumerate(mask) if type(value) is not int or value not in (0, 1))
        raise RowError(f"loss_mask holds {show(mask[place])} at position {place}; need 0 or 1")
    if len(mask) != num_tokens:
        whole = num_prompt_tokens is not None and len(mask) == num_prompt_tokens + num_tokens
        hint = ", as many as prompt and response" if whole else ""
        raise RowError(
            f"loss_mask has {len(mask)} entries for a response of {num_tokens} tokens{hint}; "
            f"it covers the response only, one entry per response token"
        )


def _reward(value: Any, name: str) -> float:
    # A comparison with NaN is false.
    if type(value) not in (float, int) or not abs(value) < LARGEST_REWARD:
        raise RowError(f"{name} is {show(value)}; need a finite number below {LARGEST_REWARD:g} in size")
    return float(value)


def _rewards(value: Any) -> dict[str, float]:
    if value is None:
        return {}
    if type(value) is not dict:
        raise RowError(f"rewards is {show(value)}; need an object of names and numbers")
    return {name: _reward(number, f"rewards[{show(name)}]") for name, number in value.items()}


def _trajectory(value: Any) -> int | str | None:
    if value is not None and type(value) not in (int, str):
        raise RowError(f"trajectory is {show(value)}; need a whole number or a text")
    return value


def _facts(row: dict[str, Any]) -> dict[str, Any]:
    """The prompt's facts that the row gives."""
    facts = {name: row[name] for name in FACTS if row.get(name) is not None}
    if type(facts.get("data_source", "")) is not str:
        raise RowError(f"data_source is {show(facts['data_source'])}; need a text")
    if type(facts.get("extra_info", {})) is not dict:
        raise RowError(f"extra_info is {show(facts['extra_info'])}; need an object")
    return facts
