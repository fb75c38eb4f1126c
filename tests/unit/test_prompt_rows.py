"""One row: what is accepted, and one line for each thing that is not."""
import re

import numpy as np
import pytest

from megatron_longstraw.config import DataConfig, parse_args
from megatron_longstraw.data.prompt_rows import columns, missing_columns, parse_prompt_row
from megatron_longstraw.data.rows import RowError

KEYS = DataConfig()
PLAIN = {"prompt": "2 + 2 =", "answer": "4"}
MESSAGES = [{"role": "user", "content": "2 + 2 ="}]
VERL = {
    "data_source": "math",
    "prompt": MESSAGES,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7, "split": None},
    "id": "q7",
}


def parse(row, number=3, keys=KEYS):
    return parse_prompt_row(row, keys, number)


def test_plain_row():
    row = parse(PLAIN)
    assert (row.id, row.data_source, row.prompt, row.ground_truth, row.extra_info) == ("3", "", "2 + 2 =", "4", {})


def test_row_of_verl():
    row = parse(VERL)
    assert (row.id, row.data_source, row.prompt, row.ground_truth) == ("q7", "math", MESSAGES, "4")
    assert row.extra_info == {"index": 7, "split": None}


def test_messages_as_parquet_gives_them():
    """Fields that only other messages have come as null."""
    calls = [{"function": {"name": "f"}}]
    messages = [
        {"role": "user", "content": "a", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    assert parse(PLAIN | {"prompt": messages}).prompt == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]


IDS = [5, 0, 7]


@pytest.mark.parametrize("row", [{"prompt_ids": IDS}, {"prompt": IDS}, {"prompt": "x", "prompt_ids": IDS}])
def test_prompts_of_ids(row):
    prompt = parse(row | {"answer": 1}).prompt
    assert prompt.dtype == np.int64 and prompt.tolist() == IDS


def test_null_ids_beside_a_text():
    assert parse(PLAIN | {"prompt_ids": None}).prompt == "2 + 2 ="


def test_renamed_columns():
    flags = "--input-key q --label-key a --reward-fn-key src --id-key uid --extra-info-key x --reward-model-key rm"
    keys = parse_args(flags.split()).data
    row = parse({"q": "?", "a": 4, "src": "s", "uid": 12, "x": {"k": 1}}, keys=keys)
    assert (row.id, row.data_source, row.prompt, row.ground_truth, row.extra_info) == ("12", "s", "?", 4, {"k": 1})
    assert parse({"q": "?", "rm": {"ground_truth": [1]}}, keys=keys).ground_truth == [1]
    assert set(columns(keys)) == {"q", "prompt_ids", "a", "rm", "src", "x", "uid"}


def test_no_column_is_guessed():
    keys = parse_args(["--prompt-key", "question"]).data
    assert missing_columns({"prompt", "answer"}, keys) and missing_columns({"question"}, keys)
    assert missing_columns(["question", "answer"], keys) is None


WRONG_TYPES = (None, 1.5, True, {"a": 1})
NO_IDS = ([1, "2"], [1, 2.0], [1, None], [True], [3, -1], [2**63], ["a"])
NO_CONTENT = (None, 3, {}, [{"type": "text"}])
BAD = [
    *[(value, "need an object") for value in (None, 3, "text", [PLAIN], 1.5, True)],
    *[({}, "--prompt-key"), ({"answer": "4"}, "--prompt-key"), ({"question": "2", "answer": "4"}, "'question'")],
    *[({"prompt": "2"}, "--answer-key"), ({"prompt": "2", "label": "4"}, "--reward-model-key")],
    *[(PLAIN | {"prompt": value}, "prompt is") for value in (*WRONG_TYPES, 3, "", [])],
    *[(PLAIN | {"prompt": value}, "position") for value in NO_IDS],
    *[(PLAIN | {"prompt_ids": value}, "prompt_ids") for value in ("text", [], 3, MESSAGES, [[1]], [1.0])],
    *[(PLAIN | {"prompt": [MESSAGES[0], value]}, "message 2") for value in (None, "text", 3, [])],
    *[(PLAIN | {"prompt": [{"role": value, "content": "a"}]}, "role") for value in (None, 3, "", ["user"])],
    *[(PLAIN | {"prompt": [{"role": "user", "content": value}]}, "content") for value in NO_CONTENT],
    *[(PLAIN | {"prompt": [value]}, "of message 1") for value in ({}, {"role": "user"}, {"content": "a"})],
    *[(PLAIN | {"answer": value}, "answer is") for value in (None, float("nan"))],
    *[(VERL | {"reward_model": value}, "need an object with ground_truth") for value in (None, "4", 4, [], ["4"])],
    *[(VERL | {"reward_model": value}, "ground_truth") for value in ({}, {"ground_truth": None}, {"style": "rule"})],
    *[(PLAIN | {"data_source": value}, "data_source") for value in (*WRONG_TYPES, 3, ["a"])],
    *[(PLAIN | {"id": value}, "id is") for value in (*WRONG_TYPES, "", [1], float("nan"))],
    *[(PLAIN | {"extra_info": value}, "extra_info") for value in ("text", 3, [], [{}], 1.5, True)],
]


@pytest.mark.parametrize("row, words", BAD)
def test_bad_rows_are_refused_in_one_line(row, words):
    with pytest.raises(RowError) as error:
        parse(row)
    message = str(error.value)
    assert message.startswith("row 3") and words in message and "\n" not in message and len(message) < 400
    if isinstance(row, dict) and isinstance(row.get("id"), str) and row["id"]:
        assert f"(id {row['id']!r})" in message
    assert re.search("need|name", message)


def test_a_long_value_is_not_repeated_whole():
    with pytest.raises(RowError) as error:
        parse(PLAIN | {"extra_info": "line\n" * 10_000, "id": "x" * 10_000})
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)
