"""tools/validate_data.py on prompt files."""
import json
import re
from types import SimpleNamespace

import pyarrow
import pytest
import validate_data
from pyarrow import parquet

from megatron_longstraw.data.rollout_groups import format_group
from megatron_longstraw.types import Branch, PromptGroup
from tests.tiny_tokenizers import byte_level

ROWS = [
    {"id": "a", "prompt": "the cat sat", "answer": "1", "data_source": "toy"},
    {"id": "b", "prompt": [{"role": "user", "content": "words"}], "answer": "2", "data_source": "toy"},
    {"id": "c", "prompt_ids": [1, 2, 3], "answer": "3"},
]


@pytest.fixture
def validate(capsys):
    """Runs the tool in this process, since loading tokenizers takes seconds."""

    def run(path, *flags):
        status = validate_data.main([str(part) for part in (path, *flags)])
        return SimpleNamespace(returncode=status, **capsys.readouterr()._asdict())

    return run


def written(tmp_path, rows, name="prompts.jsonl"):
    path = tmp_path / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_level(tmp_path_factory.mktemp("tokenizer"))


def test_report_without_a_tokenizer(tmp_path, validate):
    done = validate(written(tmp_path, ROWS))
    assert (done.returncode, done.err) == (0, "")
    for text in ("3 rows: 2 of toy, 1 of no source", "prompt characters: 5 to 11", "prompt tokens: 3 to 3"):
        assert text in done.out
    assert done.out.endswith("\naccepted\n")


def test_a_tokenizer_gives_lengths_in_tokens(tmp_path, tokenizer, validate):
    """Text with its BOS, messages with their template; two responses of four tokens to each."""
    sizes = ["--group-size", "2", "--max-response-length", "4"]
    done = validate(written(tmp_path, ROWS[:1]), "--tokenizer", tokenizer, *sizes)
    (tokens,) = map(int, re.findall(r"prompt tokens: .*, sum (\d+)", done.out))
    assert done.returncode == 0 and 4 <= tokens <= 12 and "characters" not in done.out
    assert re.search(rf"whole sequences +{2 * (tokens + 3)} ", done.out)
    templated = validate(written(tmp_path, ROWS[:1]), "--tokenizer", tokenizer, "--apply-chat-template")
    (more,) = map(int, re.findall(r"prompt tokens: .*, sum (\d+)", templated.out))
    assert more > tokens
    assert "prompt tokens" in validate(written(tmp_path, ROWS[1:2]), "--tokenizer", tokenizer).out


def test_every_bad_row_is_a_line(tmp_path, validate):
    rows = [ROWS[0], {"id": "x", "prompt": "", "answer": "1"}, "{not json", ROWS[0], {"id": "z", "prompt": "p"}]
    path = written(tmp_path, rows)
    done = validate(path)
    assert (done.returncode, done.err) == (1, "")
    lines = [line for line in done.out.splitlines() if line.startswith(f"{path}: row ")]
    assert [re.search(r"row (\d+)", line)[1] for line in lines] == ["2", "3", "4", "5"]
    assert "(id 'x')" in lines[0] and "the same id as row 1" in lines[2]
    assert done.out.endswith("refused: 4 problems\n")


def test_limits(tmp_path, tokenizer, validate):
    path = written(tmp_path, ROWS)
    flags = ["--tokenizer", tokenizer, "--max-prompt-length", "3"]
    done = validate(path, *flags)
    assert done.returncode == 1 and re.search(r"row 1 \(id 'a'\): .*the limit is 3: .*--truncation left", done.out)
    left = validate(path, *flags, "--truncation", "left")
    assert left.returncode == 0 and "2 longer than --max-prompt-length 3: truncation left" in left.out
    done = validate(path, "--vocab-size", "3")
    assert done.returncode == 1 and "row 3 (id 'c'): the prompt holds id 3; ids must be in 0..2" in done.out
    assert "has 3 prompts, need at least --train-batch-size 4" in validate(path, "--train-batch-size", "4").out


def test_ids_of_rollouts_are_held_against_the_tokenizer(tmp_path, tokenizer, validate):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(format_group(0, PromptGroup([1, 2], [Branch([3], reward=1.0), Branch([10**6], reward=0.0)])))
    assert validate(path).returncode == 0
    done = validate(path, "--tokenizer", tokenizer)
    assert done.returncode == 1 and "row 2: step 0, group 0, branch 1: response_ids holds id 1000000" in done.out


def test_parquet(tmp_path, validate):
    path = tmp_path / "prompts.parquet"
    rows = [{"prompt": "p", "answer": "a"}, {"prompt": "q", "answer": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    done = validate(path)
    assert done.returncode == 1 and "row 2" in done.out and "row 1" not in done.out


@pytest.mark.parametrize("name, content, words", [
    ("empty.jsonl", "", "empty"),
    ("prompts.txt", "x\n", "need a .jsonl"),
    ("broken.parquet", "PAR1", "not a whole Parquet file"),
])  # fmt: skip
def test_files_that_are_no_prompts_at_all(name, content, words, tmp_path, validate):
    path = tmp_path / name
    path.write_text(content)
    done = validate(path)
    assert done.returncode == 1 and words in done.out + done.err


def test_a_tokenizer_that_is_none(tmp_path, validate):
    done = validate(written(tmp_path, ROWS), "--tokenizer", tmp_path / "nowhere")
    assert done.returncode == 1 and "nowhere" in done.err
