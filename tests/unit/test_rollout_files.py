"""Rollout files as a whole: written a step at a time, read a step at a time, and refused in one line when bad."""
import json
import tracemalloc

import numpy as np
import pytest

from megatron_longstraw.data.rollout_files import RolloutReader, RolloutWriter
from megatron_longstraw.data.rows import RowError, iter_lines
from megatron_longstraw.types import Branch, PromptGroup
from tests.rollout_cases import GROUPS, LIMITS, MAX_ROW_BYTES, STEPS, bad_files, dump, good_rows

BAD_FILES = list(bad_files())


def reader_of(path, **options):
    return RolloutReader(path, **{"max_row_bytes": MAX_ROW_BYTES, "limits": LIMITS} | options)


def read_all(path, **options):
    reader = reader_of(path, **options)
    reader.check_steps(0, STEPS)
    return [reader.prompts(step, GROUPS) for step in range(STEPS)]


@pytest.fixture
def good_file(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(dump(good_rows()))
    return path


def test_the_good_file_is_accepted(good_file):
    steps = read_all(good_file)
    assert [[group.group_id for group in groups] for groups in steps] == [["0-0", "0-1"], ["1-0", "1-1"]]
    group = steps[1][0]
    assert group.prompt_ids.tolist() == [10, 11, 12, 13, 14]
    assert (group.data_source, group.ground_truth) == ("toy", "42")
    assert [branch.response_ids.tolist() for branch in group.branches] == [[7, 8, 0], [7, 8, 1], [7, 8, 2]]
    assert [branch.reward for branch in group.branches] == [0.0, 0.5, 1.0]
    assert group.branches[2].loss_mask.tolist() == [1, 0, 1]


def test_there_are_enough_bad_files():
    assert len(BAD_FILES) >= 100 and len({name for name, _, _ in BAD_FILES}) == len(BAD_FILES)


@pytest.mark.parametrize("content, words", [case[1:] for case in BAD_FILES], ids=[case[0] for case in BAD_FILES])
def test_bad_files_are_refused_in_one_line(content, words, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(RowError) as error:
        read_all(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and len(message.splitlines()) == 1 and len(message) < 500 + len(str(path))
    for word in words:
        assert word in message


def test_files_that_cannot_be_opened(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(RowError, match="cannot be read .* --rollout-file"):
            reader_of(path)


def test_a_file_that_ends_before_the_run_does_is_refused_at_once(good_file):
    with pytest.raises(RowError, match="last step is 1, the run needs steps 0 to 2; lower --train-iters"):
        reader_of(good_file).check_steps(0, 3)


def test_steps_may_be_asked_for_in_any_order(good_file):
    """A run looks at step 0 before it starts; a resumed one begins later."""
    in_order = read_all(good_file)
    reader = reader_of(good_file)
    for step in (1, 0, 0, 1):
        ids = [[branch.response_ids.tolist() for branch in group.branches] for group in reader.prompts(step, GROUPS)]
        assert ids == [[branch.response_ids.tolist() for branch in group.branches] for group in in_order[step]]


def test_a_bad_row_names_its_line_also_when_reading_starts_later(good_file):
    rows = good_rows()
    rows[10]["reward"] = "x"
    good_file.write_bytes(dump(rows))
    reader = reader_of(good_file)
    with pytest.raises(RowError, match="row 11: step 1, group '1-1', branch 1: reward is 'x'"):
        reader.prompts(1, GROUPS)
    reader.prompts(0, GROUPS)
    with pytest.raises(RowError, match="row 11:"):
        reader.prompts(1, GROUPS)


class Prompts:
    """Training prompts of the good file, cut to the last `limit` tokens."""

    def __init__(self, limit=None, missing=()):
        self.limit, self.missing = limit, missing

    def prompts(self, step, num_prompts):
        names = [f"{step}-{number}" for number in range(num_prompts)]
        ids = [np.arange(5) + 10 * step + number for number in range(num_prompts)]
        return [
            PromptGroup(own if self.limit is None else own[-self.limit :], group_id=name)
            for name, own in zip(names, ids)
            if name not in self.missing
        ]


def test_prompts_must_be_those_that_train(good_file):
    """I10: sampled from 5 tokens, trained on the last 4."""
    read_all(good_file, task=Prompts())
    with pytest.raises(RowError, match="row 1: group '0-0' of step 0 was sampled from another .*5 and 4 tokens"):
        read_all(good_file, task=Prompts(limit=4))
    with pytest.raises(RowError, match="row 4: group '0-1' of step 0 is none of the step's training prompts"):
        read_all(good_file, task=Prompts(missing=["0-1"]))


def test_a_reference_stands_for_a_training_prompt(good_file):
    rows = good_rows()
    for row in rows[::3]:
        ids = row.pop("prompt_ids")
        row["prompt_ref"] = {"file": "p.jsonl", "row": 1, "num_tokens": len(ids), "digest": row["prompt_digest"]}
    good_file.write_bytes(dump(rows))
    groups = read_all(good_file, task=Prompts())[0]
    assert [group.prompt_ids.tolist() for group in groups] == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]
    with pytest.raises(RowError, match="row 1: group '0-0' of step 0 refers to a prompt of another file; need it in --train-files"):
        read_all(good_file)


def test_a_reference_may_name_a_row_of_the_prompt_file(good_file):
    """Whoever sampled need not have numbered groups and steps as this run does."""
    rows = good_rows()
    rows[0]["prompt_ref"] = {"file": "p.jsonl", "id": "x", "num_tokens": 5, "digest": rows[0]["prompt_digest"]}
    del rows[0]["prompt_ids"]
    good_file.write_bytes(dump(rows))
    task = Prompts(missing=["0-0"])
    task.find_prompt = lambda reference: np.arange(5) if reference["id"] == "x" else None
    assert read_all(good_file, task=task)[0][0].prompt_ids.tolist() == [0, 1, 2, 3, 4]
    task.find_prompt = lambda reference: np.arange(4)
    with pytest.raises(RowError, match="row 1: group '0-0' of step 0 was sampled from another prompt .*5 and 4 tokens"):
        read_all(good_file, task=task)


def group_of(number, prompt_tokens=8):
    return PromptGroup(np.arange(prompt_tokens), [Branch([1, 2], reward=float(i)) for i in range(3)], group_id=number)


def test_a_killed_run_leaves_whole_steps_and_one_row_cut_short(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    writer = RolloutWriter(path)
    for step in range(2):
        writer.write(step, [group_of(0), group_of(1)])
        assert path.read_bytes().count(b"\n") == 6 * (step + 1), "a step is there as soon as it is written"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(RowError, match="row 12: ends in the middle .*delete the line"):
        reader_of(path)
    path.write_bytes(path.read_bytes()[: path.read_bytes().rindex(b"\n") + 1])
    assert len(reader_of(path).prompts(0, 2)) == 2
    with pytest.raises(RowError, match="row 11: group 1 of step 1 ends after 2 of 3 rows"):
        reader_of(path).prompts(1, 2)


def test_a_new_run_starts_a_new_file(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    for _ in range(2):
        RolloutWriter(path).write(0, [group_of(0)])
    assert path.read_bytes().count(b"\n") == 3


def test_nothing_of_a_step_is_written_when_a_group_cannot_be(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    broken = group_of(1)
    broken.ground_truth = {1, 2}
    with pytest.raises(ValueError, match="group 1 .*set.*--no-save-rollouts"):
        RolloutWriter(path).write(0, [group_of(0), broken])
    assert path.read_bytes() == b""


def test_memory_is_that_of_a_step_not_of_the_file(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    writer = RolloutWriter(path)
    for step in range(40):
        writer.write(step, [group_of(0, 20_000)])
    reader = RolloutReader(path, 2**20)
    tracemalloc.start()
    for step in range(40):
        reader.prompts(step, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 4_000_000
    assert peak < 4_000_000, "a megabyte of buffer and two rows; all rows together would take 30 as objects"


def test_a_row_above_the_limit_is_not_read_into_memory(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"step": "' + b"x" * 20_000_000 + b'"}\n' + dump([{"step": 0}]))
    tracemalloc.start()
    lines = list(iter_lines(path, MAX_ROW_BYTES))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(line.number, line.is_cut) for line in lines] == [(1, True), (2, False)]
    assert json.loads(lines[1].text) == {"step": 0} and path.read_bytes()[lines[1].offset :] == lines[1].text
    assert peak < 10_000_000
