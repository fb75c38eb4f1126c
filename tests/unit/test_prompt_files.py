"""Rows of files: the same by scan and by place, never a whole file in memory, and every bad one named."""
import json
import subprocess
import sys
import tracemalloc

import numpy as np
import orjson
import pyarrow
import pytest
from pyarrow import parquet

from megatron_longstraw.config import ConfigError, DataConfig
from megatron_longstraw.data.prompt_files import PromptFileError, iter_rows
from megatron_longstraw.data.rows import RowError
from megatron_longstraw.data.prompt_set import PromptSet

KEYS = DataConfig()
ROWS = [
    {
        "id": f"q{i}",
        "data_source": "math",
        "prompt": [{"role": "user", "content": f"{i} + {i} ="}] if i % 3 else [{"role": "system", "content": "é🐈"}],
        "reward_model": {"ground_truth": str(2 * i), "style": "rule"},
        "extra_info": {"index": i},
    }
    for i in range(200)
]


def write_jsonl(path, rows):
    path.write_bytes(b"".join(row if isinstance(row, bytes) else orjson.dumps(row) + b"\n" for row in rows))
    return path


def write_parquet(path, rows, **options):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


@pytest.fixture(params=["jsonl", "one group", "small groups"])
def path(request, tmp_path):
    if request.param == "jsonl":
        return write_jsonl(tmp_path / "a.jsonl", ROWS)
    return write_parquet(tmp_path / "a.parquet", ROWS, row_group_size=1000 if request.param == "one group" else 7)


def test_rows_by_order_and_by_place(path):
    files = PromptSet([path], KEYS)
    assert len(files) == len(ROWS) and files.first_chat == 0
    assert [row.id for row in files] == [row["id"] for row in ROWS]
    places = np.random.default_rng(0).permutation(len(ROWS))[:50].tolist() + [3, 3, 199, 0]
    found = files.rows(places)
    assert [row.id for row in found] == [f"q{place}" for place in places]
    assert [row.prompt for row in found] == [ROWS[place]["prompt"] for place in places]
    assert [row.ground_truth for row in found] == [str(2 * place) for place in places]
    assert files.where(41) == f"{path}: row 42"


def test_iter_rows_gives_what_is_in_the_file(path):
    assert list(iter_rows(path, 2**20)) == list(enumerate(ROWS, 1))


def test_several_files_are_one_set(tmp_path):
    plain = [{"prompt": f"p{i}", "answer": i} for i in range(5)]
    paths = [write_jsonl(tmp_path / "a.jsonl", plain), write_parquet(tmp_path / "b.parquet", plain)]
    paths.append(write_jsonl(tmp_path / "c.jsonl", ROWS[:4]))
    files = PromptSet(paths, KEYS)
    assert [row.id for row in files] == [*map(str, range(1, 11)), "q0", "q1", "q2", "q3"]
    assert [row.id for row in files.rows([13, 0, 9, 5])] == ["q3", "1", "10", "6"]
    assert files.where(7) == f"{paths[1]}: row 3" and files.first_chat == 10


def test_last_line_needs_no_end_and_windows_lines_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a", "answer": 1}\r\n{"prompt": "b", "answer": 2}')
    files = PromptSet([tmp_path / "a.jsonl"], KEYS)
    assert [row.prompt for row in files.rows([1, 0])] == ["b", "a"]


def test_unused_columns_are_not_read(tmp_path):
    rows = [{"prompt": "a", "answer": 1, "picture": b"x" * 10_000} for _ in range(4)]
    keys = DataConfig(max_row_bytes=1000)
    assert len(PromptSet([write_parquet(tmp_path / "a.parquet", rows)], keys)) == 4


def peak_bytes(function):
    tracemalloc.start()
    try:
        result = function()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


LARGE_BYTES, LARGE_ROWS = 50 * 2**20, 800


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """50 MiB as JSONL, and as Parquet in a single row group."""
    folder = tmp_path_factory.mktemp("large")
    text = "ab c" * (LARGE_BYTES // LARGE_ROWS // 4)
    rows = [{"prompt": f"{i} {text}", "answer": i} for i in range(LARGE_ROWS)]
    pages = {"write_batch_size": 4, "data_page_size": 2**20}
    write_parquet(folder / "a.parquet", rows, compression="none", use_dictionary=False, **pages)
    return write_jsonl(folder / "a.jsonl", rows)


def test_a_file_is_not_held_in_memory(large):
    files, opening = peak_bytes(lambda: PromptSet([large], KEYS))
    rows, reading = peak_bytes(lambda: files.rows([799]))
    assert large.stat().st_size > LARGE_BYTES and rows[0].ground_truth == 799
    assert opening < 4 * 2**20 and reading < 4 * 2**20


def test_a_parquet_file_is_not_held_in_memory(large):
    code = (
        "import sys, pyarrow\n"
        "from megatron_longstraw.data.prompt_set import DataConfig, PromptSet\n"
        "files = PromptSet(sys.argv[1:], DataConfig())\n"
        "print(files.rows([799])[0].ground_truth, len(files), pyarrow.default_memory_pool().max_memory())"
    )
    path = large.with_suffix(".parquet")
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    answer, num_rows, peak = map(int, done.stdout.split())
    assert (answer, num_rows) == (799, LARGE_ROWS) and path.stat().st_size > LARGE_BYTES
    assert 0 < peak < LARGE_BYTES / 4


def test_small_rows_cost_few_bytes(tmp_path):
    num_rows = 10_000
    path = write_jsonl(tmp_path / "a.jsonl", [b'{"prompt":"a","answer":1}\n'] * num_rows)
    files, peak = peak_bytes(lambda: PromptSet([path], KEYS))
    assert len(files) == num_rows and peak < 100 * num_rows + 2**21


def test_too_large_rows_are_skipped_without_reading_them_whole(tmp_path):
    line = orjson.dumps({"prompt": "a" * 2**25, "answer": 1}) + b"\n"
    path = write_jsonl(tmp_path / "a.jsonl", [ROWS[0], line, ROWS[1], line[:-1]])
    found, peak = peak_bytes(lambda: list(iter_rows(path, 10_000)))
    assert [number for number, _ in found] == [1, 2, 3, 4]
    assert [row["id"] for _, row in found[::2]] == ["q0", "q1"]
    assert all(isinstance(row, RowError) and "--max-row-bytes" in str(row) for _, row in found[1::2])
    assert peak < 2**23


@pytest.mark.parametrize("spare, accepted", [(0, True), (-1, False)])
def test_largest_row(tmp_path, spare, accepted):
    line = orjson.dumps({"prompt": "a", "answer": 1})
    path = write_jsonl(tmp_path / "a.jsonl", [line + b"\n", line])
    errors = [isinstance(row, RowError) for _, row in iter_rows(path, len(line) + spare)]
    assert errors == [not accepted] * 2


def problems(paths, keys=KEYS):
    with pytest.raises(ConfigError) as error:
        PromptSet(paths, keys)
    for problem in error.value.problems:
        assert "\n" not in problem and len(problem) < 600
    return error.value.problems


def test_a_changed_file_is_refused(path):
    files = PromptSet([path], KEYS)
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(PromptFileError, match="changed"):
        files.rows([0])
    path.unlink()
    with pytest.raises(PromptFileError, match="changed"):
        files.rows([0])


def test_all_bad_rows_are_named_up_to_a_limit(tmp_path):
    bad = [{"id": f"b{i}", "prompt": None, "answer": i} for i in range(50)]
    paths = [write_jsonl(tmp_path / "a.jsonl", [ROWS[0], *bad[:2]]), write_jsonl(tmp_path / "b.jsonl", bad[2:])]
    found = problems(paths)
    assert found[0].startswith(f"{paths[0]}: row 2 (id 'b0')") and found[2].startswith(f"{paths[1]}: row 1 (id 'b2')")
    assert len(found) == 21 and found[-1] == "and 30 more"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_ids_that_occur_twice(tmp_path, kind):
    write = {"jsonl": write_jsonl, "parquet": write_parquet}[kind]
    first = write(tmp_path / f"a.{kind}", ROWS[:50])
    second = write(tmp_path / f"b.{kind}", [*ROWS[60:65], ROWS[60], *ROWS[10:18]])
    found = problems([first, second])
    assert len(found) == 9
    assert found[0].startswith(f"{second}: row 6 (id 'q60')") and f"{second}: row 1;" in found[0]
    for i, problem in enumerate(found[1:]):
        assert problem.startswith(f"{second}: row {7 + i} (id 'q{10 + i}')") and f"{first}: row {11 + i};" in problem


def test_a_number_and_its_spelling_are_one_id(tmp_path):
    rows = [{"id": 1, "prompt": "a", "answer": 1}, {"id": "1", "prompt": "b", "answer": 1}]
    (problem,) = problems([write_jsonl(tmp_path / "a.jsonl", rows)])
    assert "row 2 (id '1')" in problem


FILES = [
    ("a.jsonl", b"", "empty"),
    ("a.parquet", b"", "empty"),
    ("a.json", b"[]", ".jsonl"),
    ("a.csv", b"prompt,answer\n", ".jsonl"),
    ("a", b"{}", ".jsonl"),
    ("a.jsonl.gz", b"\x1f\x8b", ".jsonl"),
    ("a.parquet", b'{"prompt": "a", "answer": 1}\n', "Parquet"),
    ("a.jsonl", b"PAR1\x15\x04", "Parquet"),
]


@pytest.mark.parametrize("name, content, word", FILES)
def test_files_of_another_kind(tmp_path, name, content, word):
    (tmp_path / name).write_bytes(content)
    (problem,) = problems([tmp_path / name])
    assert problem.startswith(f"{tmp_path / name}: ") and word in problem
    with pytest.raises(PromptFileError, match=word):
        list(iter_rows(tmp_path / name, 100))


def test_files_that_cannot_be_opened(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    found = problems([tmp_path / "missing.jsonl", tmp_path / "folder.jsonl", tmp_path / "missing.parquet"])
    assert len(found) == 3 and all("cannot be read" in problem for problem in found)


@pytest.mark.parametrize("column, flag", [("prompt", "--prompt-key"), ("reward_model", "--reward-model-key")])
def test_a_parquet_file_without_a_column_is_one_problem(tmp_path, column, flag):
    rows = [{key: value for key, value in row.items() if key != column} | {"Q": 1} for row in ROWS]
    (problem,) = problems([write_parquet(tmp_path / "a.parquet", rows)])
    assert flag in problem and "'Q'" in problem


def test_an_empty_table(tmp_path):
    (problem,) = problems([write_parquet(tmp_path / "a.parquet", ROWS, row_group_size=10).parent / "b.parquet"])
    assert "cannot be read" in problem
    parquet.write_table(pyarrow.Table.from_pylist(ROWS)[:0], tmp_path / "c.parquet")
    (problem,) = problems([tmp_path / "c.parquet"])
    assert "no rows" in problem


def good_lines():
    return [orjson.dumps(row) + b"\n" for row in ROWS[:6]]


def bad_lines(rng):
    """(name, bytes of one line) that no reader may accept or choke on."""
    line = good_lines()[0].rstrip()
    for cut in rng.choice(np.arange(1, len(line)), 30, replace=False):
        yield "cut short", line[:cut]
    text_at = line.index(b"math")
    for byte in (0x80, 0xC3, 0xE2, 0xF0, 0xFF, 0xC0, 0xED):
        yield "invalid UTF-8", line[:text_at] + bytes([byte]) + line[text_at + 1 :]
    for byte in range(0x00, 0x20, 3):
        if byte != 0x0A:
            yield "control character", line[:text_at] + bytes([byte]) + line[text_at:]
    for place in rng.choice(len(line), 15, replace=False):
        yield "stray bracket", line[:place] + b"}]" + line[place:] if line[place] in b"{}[]:," else line + b"}"
    for text in (b"", b"   ", b"null", b"[]", b"NaN", b"{}", b"{'prompt': 1}", b"prompt: a", b"\xef\xbb\xbf" + line):
        yield "another language", text
    yield "lone surrogate", line.replace(b'"math"', b'"\\ud800"')
    yield "two on a line", line + line
    yield "deep", b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    yield "too large", orjson.dumps({"id": "big", "prompt": "a" * 20_000, "answer": 1})


def test_bad_lines_are_each_named(tmp_path):
    keys, count = DataConfig(max_row_bytes=15_000), 0
    for number, (name, bad) in enumerate(bad_lines(np.random.default_rng(0))):
        place = number % 6
        good = good_lines()[1:]
        path = write_jsonl(tmp_path / "a.jsonl", [*good[:place], bad + b"\n", *good[place:]])
        found = problems([path], keys)
        assert len(found) == 1 and found[0].startswith(f"{path}: row {place + 1}"), (name, bad, found)
        count += 1
    assert count > 70


def test_broken_parquet_files(tmp_path):
    whole = write_parquet(tmp_path / "whole.parquet", ROWS, row_group_size=50, write_page_checksum=True).read_bytes()
    path, rng = tmp_path / "a.parquet", np.random.default_rng(0)
    for cut in rng.choice(np.arange(1, len(whole)), 30, replace=False):
        path.write_bytes(whole[:cut])
        (problem,) = problems([path])
        assert problem.startswith(f"{path}: is not a whole Parquet file")
    for place in rng.choice(np.arange(4, len(whole) // 2), 30, replace=False):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert [row.prompt for row in PromptSet([path], KEYS)] == [row["prompt"] for row in ROWS]
        except ConfigError as error:
            assert all(problem.startswith(f"{path}: ") and "\n" not in problem for problem in error.problems)


LONG = b"c" * 5000
BAD_VALUES = [({1: b"\xff"}, ["row 2"]), ({3: LONG}, ["row 4"]), ({1: b"\xff", 3: LONG}, ["row 2", "row 4"])]


@pytest.mark.parametrize("values, expected", BAD_VALUES)
def test_a_parquet_row_that_is_no_text_or_too_large(tmp_path, values, expected):
    texts = pyarrow.array([values.get(i, b"a") for i in range(4)], pyarrow.binary()).cast(pyarrow.string(), safe=False)
    parquet.write_table(pyarrow.table({"prompt": texts, "answer": [1, 2, 3, 4]}), tmp_path / "a.parquet")
    found = problems([tmp_path / "a.parquet"], DataConfig(max_row_bytes=1000))
    assert [problem.split(": ")[1] for problem in found] == expected


def test_messages_are_read_alike_from_both(tmp_path):
    json_files = PromptSet([write_jsonl(tmp_path / "a.jsonl", ROWS)], KEYS)
    tables = PromptSet([write_parquet(tmp_path / "a.parquet", ROWS)], KEYS)
    assert list(json_files) == list(tables)
    assert json.dumps(next(iter(tables)).prompt)
