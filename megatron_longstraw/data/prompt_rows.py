"""One row of a prompt file: what it must hold, and what is wrong with it in one line."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Collection

import numpy as np

from megatron_longstraw.config import DataConfig
from megatron_longstraw.data.rows import RowError, show

PROMPT_IDS_KEY = "prompt_ids"
"""Column of prompts that are token ids already; where it is filled, the text beside it is not read."""


@dataclass(frozen=True)
class PromptRow:
    """A checked row."""

    id: str
    """The id column as a text; without one, the row's number."""
    data_source: str
    """"" where the row has none."""
    prompt: str | list[dict[str, Any]] | np.ndarray
    """A text, messages (each with the texts `role` and `content`), or token ids int64 [P]; never empty."""
    ground_truth: Any
    """Never None."""
    extra_info: dict[str, Any]


def parse_prompt_row(row: Any, keys: DataConfig, number: int) -> PromptRow:
    """Check one row, as JSON or Parquet gave it.

    Args:
        number: 1-based number of the row in its file.

    Raises:
        RowError: see there; for the first thing that is wrong.
    """
    try:
        if not isinstance(row, dict):
            raise RowError(f"is {show(row)}; need an object with a prompt and an answer")
        problem = missing_columns(row, keys)
        if problem is not None:
            raise RowError(problem)
        return PromptRow(
            id=_id(row, keys, number),
            data_source=_data_source(row, keys),
            prompt=_prompt(row, keys),
            ground_truth=_ground_truth(row, keys),
            extra_info=_extra_info(row, keys),
        )
    except RowError as error:
        raise RowError(f"{_name(row, keys, number)}: {error}") from None


def columns(keys: DataConfig) -> list[str]:
    """All columns that are read."""
    return [
        keys.prompt_key, PROMPT_IDS_KEY, keys.answer_key, keys.reward_model_key, keys.data_source_key,
        keys.extra_info_key, keys.id_key,
    ]  # fmt: skip


def missing_columns(names: Collection[str], keys: DataConfig) -> str | None:
    """What a row or a table with these columns lacks, or None."""
    has = f"it has {', '.join(map(repr, list(names)[:12])) or 'nothing'}"
    if keys.prompt_key not in names and PROMPT_IDS_KEY not in names:
        return f"has no {keys.prompt_key!r} ({has}); name the prompt's column with --prompt-key"
    if keys.reward_model_key not in names and keys.answer_key not in names:
        return (
            f"has neither {keys.reward_model_key!r} nor {keys.answer_key!r} ({has}); "
            f"name one with --reward-model-key or --answer-key"
        )
    return None


def _name(row: Any, keys: DataConfig, number: int) -> str:
    row_id = row.get(keys.id_key) if isinstance(row, dict) else None
    return f"row {number}" if row_id is None else f"row {number} (id {show(row_id)})"


def _id(row: dict, keys: DataConfig, number: int) -> str:
    if keys.id_key not in row:
        return str(number)
    value = row[keys.id_key]
    if not isinstance(value, (str, int)) or isinstance(value, bool) or value == "":
        raise RowError(f"{keys.id_key} is {show(value)}; need a text or a whole number; change --id-key or the row")
    return str(value)


def _data_source(row: dict, keys: DataConfig) -> str:
    value = row.get(keys.data_source_key, "")
    if not isinstance(value, str):
        raise RowError(f"{keys.data_source_key} is {show(value)}; need a text; change --data-source-key or the row")
    return value


def _prompt(row: dict, keys: DataConfig) -> str | list[dict] | np.ndarray:
    key = keys.prompt_key if row.get(PROMPT_IDS_KEY) is None else PROMPT_IDS_KEY
    value = row.get(key)
    if isinstance(value, str) and value and key != PROMPT_IDS_KEY:
        return value
    if not isinstance(value, list) or not value:
        forms = "token ids" if key == PROMPT_IDS_KEY else "a text, a list of messages or token ids"
        raise RowError(f"{key} is {show(value)}; need {forms}, not empty; change --prompt-key or the row")
    if isinstance(value[0], dict) and key != PROMPT_IDS_KEY:
        return [_message(message, place) for place, message in enumerate(value, 1)]
    return _token_ids(value, key)


def _token_ids(value: list, key: str) -> np.ndarray:
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**63:
        return np.array(value, dtype=np.int64)
    place = next(i for i, token in enumerate(value) if type(token) is not int or not 0 <= token < 2**63)
    raise RowError(f"{key} holds {show(value[place])} at position {place}; need whole numbers >= 0; change the row")


def _message(message: Any, place: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError(f"message {place} is {show(message)}; need an object with role and content; change the row")
    # Parquet fills fields that only other messages have with null, and templates ask whether a field is there.
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("tool_calls"):
        message.setdefault("content", "")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str) or not message[key] and key == "role":
            raise RowError(f"{key} of message {place} is {show(message.get(key))}; need a text; change the row")
    return message


def _ground_truth(row: dict, keys: DataConfig) -> Any:
    key, value = keys.answer_key, row.get(keys.answer_key)
    if keys.reward_model_key in row:
        key, value = keys.reward_model_key, row[keys.reward_model_key]
        if not isinstance(value, dict):
            raise RowError(f"{key} is {show(value)}; need an object with ground_truth; change --reward-model-key")
        key, value = f"ground_truth of {key}", value.get("ground_truth")
    if value is None or value != value:  # tables of numbers write NaN for a missing one
        raise RowError(f"{key} is {show(value)}; need the right answer; change --answer-key or the row")
    return value


def _extra_info(row: dict, keys: DataConfig) -> dict[str, Any]:
    value = row.get(keys.extra_info_key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RowError(f"{keys.extra_info_key} is {show(value)}; need an object; change --extra-info-key or the row")
    return value
