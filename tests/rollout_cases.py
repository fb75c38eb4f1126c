"""A good rollout file of two steps, and everything that can be wrong with one: (name, bytes, words of the message)."""
from __future__ import annotations

import copy
import json
from typing import Any, Iterator

import numpy as np

from megatron_longstraw.data.rollout_rows import Limits
from megatron_longstraw.types import prompt_digest

LIMITS = Limits(vocab_size=60, max_prompt_length=8, max_response_length=5)
FLAGS = ["--vocab-size", "60", "--max-prompt-length", "8", "--max-response-length", "5", "--train-batch-size", "2"]
MAX_ROW_BYTES = 2000
STEPS, GROUPS, BRANCHES = 2, 2, 3
FIRST, LATER = 6, 8
"""Places of a group's first row and of one of its later rows."""
MISSING = object()
ANY_ROW: dict[str, list] = {
    "step": [MISSING, None, -1, 1.0, "1", True, [1], 2**70],
    "group_id": [MISSING, None, 1.5, "", True, ["a"], {}],
    "branch": [MISSING, None, -1, 0.0, "0", False, 2**70],
    "response_ids": [
        MISSING, None, "abc", {}, 5, [1.0, 2, 3], [1, None, 3], [1, -2, 3], ["1", 2, 3], [True, 2, 3], [[1], 2, 3],
        [1, 2, 2**64], [1, 2, 2**63], [1, 2, 60], [1, 2, 3, 4, 5, 6],
    ],
    "response_logprobs": [
        "x", {}, -0.5, [-0.5] * 4, [-0.5] * 2, [], [-0.5, None, -0.5], [-0.5, "-0.5", 0], [-0.5, True, -0.5],
        [-0.5, 0.5, -0.5], [-0.5, -1e39, -0.5], [-0.5, [-0.5], -0.5],
    ],
    "loss_mask": ["x", {}, 1, [1] * 8, [1] * 2, [], [1, 2, 1], [1.0, 1, 1], [1, None, 1], [1, True, 1], [1, -1, 1]],
    "reward": [MISSING, "1", [1], {}, True, 1e200],
    "rewards": [[1], 1.0, {"a": "x"}, {"a": None}, {"a": 1e200}, {"a": True}],
    "finish_reason": ["abort", 1, True, [], {}],
    "trajectory": [1.5, [], {}, True],
    "data_source": [1, [], {}],
    "extra_info": ["x", [], 1],
    "prompt_digest": [1, "", [], "0" * 16],
    "lossmask": [[1, 1, 1]],
    "note": ["who knows"],
}  # fmt: skip
REFERENCE = {"file": "p.jsonl", "row": 3, "num_tokens": 5, "digest": "0" * 16}
FIRST_ROW: dict[str, list] = {
    "prompt_ids": [MISSING, None, [], "abc", {}, [1.5, 2], [1, -1], [1, None], [1, 60], list(range(9)), [1, 2]],
    "group_size": [0, -1, 2, 4, "3", 3.0],
    "prompt_ref": [REFERENCE],
}
LATER_ROW: dict[str, list] = {
    "prompt_digest": [MISSING, None],
    "data_source": ["another"],
    "ground_truth": ["another"],
    "prompt_ids": [[1, 2]],
}
TEXTS = {
    "NaN log-prob": (b"-0.125", b"NaN", "NaN"),
    "infinite log-prob": (b"-0.125", b"-Infinity", "Infinity"),
    "log-prob beyond float64": (b"-0.125", b"-1e999", "infinity"),
    "NaN reward": (b'"reward":', b'"reward":NaN,"x":', "NaN"),
    "infinite reward": (b'"reward":', b'"reward":Infinity,"x":', "Infinity"),
    "Python's None": (b'"reward":', b'"reward":None,"x":', "not JSON"),
    "single quotes": (b'"', b"'", "not JSON"),
    "two rows in a line": (b"}\n", b"}{}\n", "not JSON"),
    "comma after the row": (b"}\n", b"},\n", "not JSON"),
    "a zero byte": (b'"reward"', b'\x00"reward"', "not JSON"),
    "half a surrogate": (b'"stop"', b'"\\ud800"', "not JSON"),
    "byte order mark": (b'{"step"', b'\xef\xbb\xbf{"step"', "not JSON"),
    "UTF-16": (b'{"step"', '{"step"'.encode("utf-16-le"), "not JSON"),
    "above the row limit": (b'"stop"', b'"' + b"x" * 2 * MAX_ROW_BYTES + b'"', "--max-row-bytes"),
}
NO_OBJECTS = {"a list": b"[1,2]", "a text": b'"x"', "null": b"null", "a number": b"1.5", "nothing": b""}


def good_rows() -> list[dict[str, Any]]:
    """12 rows; exact binary fractions, so that they print as they are."""
    rows = []
    for step in range(STEPS):
        for group in range(GROUPS):
            prompt = [10 * step + group + i for i in range(5)]
            for branch in range(BRANCHES):
                first = {"group_size": BRANCHES, "prompt_ids": prompt, "data_source": "toy", "ground_truth": "42"}
                rows.append({
                    "step": step, "group_id": f"{step}-{group}", "branch": branch, **(first if branch == 0 else {}),
                    "prompt_digest": prompt_digest(prompt), "response_ids": [7, 8, branch],
                    "response_logprobs": [-0.5, -0.125, -2.0], "loss_mask": [1, 0, 1], "reward": branch / 2,
                    "finish_reason": "stop",
                })  # fmt: skip
    return rows


def dump(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)


def bad_files() -> Iterator[tuple[str, bytes, list[str]]]:
    """Each message has to hold "row N" of the right row, and the words."""
    yield from _bad_fields()
    yield from _bad_texts()
    yield from _bad_bytes()
    yield from _bad_order()


def _bad_fields() -> Iterator[tuple[str, bytes, list[str]]]:
    tables = [(LATER, ANY_ROW), (FIRST, ANY_ROW), (FIRST, FIRST_ROW), (LATER, LATER_ROW)]
    for place, table in tables:
        for key, values in table.items():
            for value in values:
                rows = good_rows()
                rows[place][key] = value
                if value is MISSING:
                    del rows[place][key]
                where = place
                if key == "group_size" and value in (2, 4):
                    where = FIRST + (2 if value == 2 else 3)  # found where the group ends
                shown = "nothing" if value is MISSING else json.dumps(value)[:30]
                yield f"row {place + 1}: {key} {shown}", dump(rows), [f"row {where + 1}:", *_ids(rows[where])]


def _ids(row: dict[str, Any]) -> list[str]:
    """Step, group and branch as a message names them, where the row has them right."""
    is_count = lambda key: type(row.get(key)) is int and row[key] < 2**63
    words = [f"step {row['step']}"] if is_count("step") else []
    words += [f"group {row['group_id']!r}"] if isinstance(row.get("group_id"), str) and row["group_id"] else []
    return words + ([f"branch {row['branch']}"] if is_count("branch") else [])


def _bad_texts() -> Iterator[tuple[str, bytes, list[str]]]:
    for place in (FIRST, LATER):
        for name, (old, new, word) in TEXTS.items():
            lines = dump(good_rows()).splitlines(keepends=True)
            assert old in lines[place]
            lines[place] = lines[place].replace(old, new)
            yield f"row {place + 1}: {name}", b"".join(lines), [f"row {place + 1}:", word]
        for name, text in NO_OBJECTS.items():
            lines = dump(good_rows()).splitlines(keepends=True)
            lines[place] = text + b"\n"
            yield f"row {place + 1} is {name}", b"".join(lines), [f"row {place + 1}:", "need a JSON object"]


def _bad_bytes() -> Iterator[tuple[str, bytes, list[str]]]:
    rng = np.random.default_rng(0)
    good = dump(good_rows())
    starts = np.cumsum([0, *map(len, good.splitlines(keepends=True))])
    for offset in rng.integers(0, len(good), 20).tolist():
        number = int(np.searchsorted(starts, offset, side="right"))
        words = ["row "] if good[offset] == 10 else [f"row {number}:", "UTF-8"]  # two rows become one without a newline
        yield f"byte 0xff at {offset}", good[:offset] + b"\xff" + good[offset + 1 :], words
    for offset in rng.integers(starts[-2] + 1, len(good) - 2, 10).tolist():
        yield f"cut at {offset}", good[:offset], ["row 12:", "delete the line"]
    yield "last row above the limit", good[:-2] + b" " * 3 * MAX_ROW_BYTES + b"}\n", ["row 12:", "more than 2000 bytes"]
    yield "an empty line at the end", good + b"\n", ["row 13:", "delete the line"]
    yield "only an empty line", b"\n", ["row 1:", "delete the line"]
    yield "no rows", b"", ["empty"]
    yield "not a text file", rng.bytes(3000), ["row "]


def _bad_order() -> Iterator[tuple[str, bytes, list[str]]]:
    def changed(name: str, change, *words: str):
        rows = good_rows()
        change(rows)
        return name, dump(rows), list(words)

    def interleave(rows):
        rows[7], rows[10] = rows[10], rows[7]

    def split_over_steps(rows):
        for row in rows[3:6]:
            row.pop("group_size", None)
        rows[5]["step"] = 1

    def rename(rows):
        for row in rows[9:12]:
            row["group_id"] = "1-0"

    def come_back(rows):
        rows.extend(copy.deepcopy(rows[6:9]))

    def no_step_one(rows):
        for row in rows[6:]:
            row["step"] = 2

    def one_group(rows):
        del rows[9:]

    def move_to_front(rows):
        rows.insert(0, rows.pop())

    for place in range(12):
        twice = lambda rows: rows.insert(place, copy.deepcopy(rows[place]))
        yield changed(f"row {place + 1} twice", twice, f"row {place + 2}:")
    for place in range(11):
        yield changed(f"row {place + 1} left out", lambda rows: rows.pop(place), f"row {place + 1}:", "step ")
    yield changed("the last row left out", lambda rows: rows.pop(), "row 11:", "2 of 3")
    yield changed("rows of two groups mixed", interleave, "row 8:")
    yield changed("a group split over steps", split_over_steps, "row 6:", "in one step")
    yield changed("two groups of one name", rename, "row 10:", "branch 0")
    yield changed("a group that comes back", come_back, "row 13:", "next to each other")
    yield changed("steps that go back", move_to_front, "row 1:", "branch 2")
    yield changed("steps in another order", lambda rows: rows.extend(rows[:6]), "step is 0")
    yield changed("a step left out", no_step_one, "no rows of step 1")
    yield changed("a step of one group", one_group, "step 1 has 1 groups", "--train-batch-size")
