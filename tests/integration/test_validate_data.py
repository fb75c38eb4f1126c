"""tools/validate_data.py on rollout files, as a user runs it."""
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import validate_data

from megatron_longstraw.config import load_config
from megatron_longstraw.data.rollout_groups import format_group
from tests.helpers import random_groups
from tests.rollout_cases import FLAGS, LIMITS, MAX_ROW_BYTES, bad_files, dump, good_rows

ROOT = Path(__file__).parents[2]
BAD_FILES = list(bad_files())


def validate(path, *flags):
    command = [sys.executable, ROOT / "tools" / "validate_data.py", path, *flags]
    return subprocess.run([str(part) for part in command], cwd=path.parent, capture_output=True, text=True, timeout=300)


def written(tmp_path, content):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(content)
    return path


def test_report_of_a_good_file(tmp_path):
    """8 responses of 4 tokens to a prompt of 64: 8 x 67 tokens as whole sequences, 63 + 63 + 32 with exact."""
    path = written(tmp_path, format_group(0, random_groups(1, 64, [4] * 8)[0]))
    done = validate(path)
    assert (done.returncode, done.stderr) == (0, "")
    for pattern in (
        r"rollouts\.jsonl: rollouts, [\d,]+ bytes",
        r"8 rows: 1 steps, 1 groups, 8 responses",
        r"32 tokens train; 0 responses without a score, 8 without log-probs, 0 empty",
        r"prompt tokens: 64 to 64, median 64, sum 64",
        r" +64 - +127 +1 +#+",
        r"response tokens: 4 to 4, median 4, sum 32",
        r"group sizes: 1 of 8",
        r" +whole sequences +536 .*",
        r" +branch replay, exact +158 .*",
        r" +branch replay, frozen +95 .*",
        r"attention.*: 4\.5 times less with exact, 7\.0 with frozen",
        r"not checked, because not given: --vocab-size, --max-prompt-length, --max-response-length",
        r"read at \d+ MB/s on one core \(.* s\)",
        r"accepted",
    ):
        assert re.search(rf"^(.*/)?{pattern}$", done.stdout, re.M), f"{pattern} not in\n{done.stdout}"


def test_every_bad_row_is_a_line(tmp_path):
    rows = good_rows()
    rows[1]["response_logprobs"] = [-0.5]
    rows[6]["reward"] = "x"
    rows[10]["loss_mask"] = [1, 2, 1]
    path = written(tmp_path, dump(rows))
    done = validate(path, *FLAGS)
    assert (done.returncode, done.stderr) == (1, "")
    lines = [line for line in done.stdout.splitlines() if line.startswith(f"{path}: row ")]
    names = ["row 2: step 0, group '0-0', branch 1:", "row 7: step 1, group '1-0'", "row 11: step 1, group '1-1'"]
    assert len(lines) == 3 and all(name in line for name, line in zip(names, lines))
    assert done.stdout.endswith("refused: 3 problems\n")
    few = validate(path, "--max-errors", "1").stdout
    assert "row 2:" in few and "row 7:" not in few and "and 2 more" in few


def test_limits_count_where_they_are_given(tmp_path):
    path = written(tmp_path, dump(good_rows()))
    assert validate(path, *FLAGS).returncode == 0
    done = validate(path, "--vocab-size", "13", "--train-batch-size", "3")
    assert done.returncode == 1 and "id 13 at position 3" in done.stdout and "--vocab-size" in done.stdout
    assert "step 0 has 2 groups, need 3" in validate(path, "--train-batch-size", "3").stdout
    toml = tmp_path / "run.toml"
    toml.write_text("[rollout]\nmax_response_length = 2\n")
    assert "3 tokens; the limit is 2" in validate(path, "--config", toml).stdout


@pytest.mark.parametrize("content, words", [
    (b"", "is empty"),
    (dump(good_rows())[:-9], "row 12: ends in the middle"),
    (None, "cannot be read"),
])  # fmt: skip
def test_files_that_are_no_rollouts_at_all(content, words, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    if content is not None:
        path.write_bytes(content)
    done = validate(path, "--kind", "rollouts")
    assert done.returncode == 1 and words in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_an_unknown_flag_names_the_closest(tmp_path):
    done = validate(written(tmp_path, dump(good_rows())), "--vocab-sise", "60")
    assert done.returncode == 1 and "did you mean --vocab-size" in done.stderr


@pytest.mark.parametrize("content, words", [case[1:] for case in BAD_FILES], ids=[case[0] for case in BAD_FILES])
def test_what_training_refuses_is_refused(content, words, tmp_path, capsys):
    """The same files as for the reader; the message of the same row is among the lines."""
    path = written(tmp_path, content)
    names = [flag.strip("-").replace("-", "_") for flag in FLAGS[::2]]
    config = load_config(overrides={"max_row_bytes": MAX_ROW_BYTES, **dict(zip(names, map(int, FLAGS[1::2])))})
    assert validate_data.given_limits(config) == LIMITS
    findings = validate_data.Findings(str(path), 100)
    check = validate_data.RolloutCheck(config, findings)
    check.run(str(path))
    printed = capsys.readouterr().out.splitlines()
    assert findings.count == len(printed) or check.num_rows == 0
    assert (findings.count or not content) and all(line.startswith(f"{path}: ") for line in printed)
    row = next((word for word in words if re.fullmatch(r"row \d+:", word)), "")
    assert any(row in line for line in printed) or not content


@pytest.mark.slow
@pytest.mark.parametrize("prompt_tokens, response_tokens, groups", [(50_000, 2_000, 40), (100, 4, 9_000)])
def test_speed(prompt_tokens, response_tokens, groups, tmp_path):
    """20 MB/s of processor time, which other work on the machine disturbs little."""
    path = tmp_path / "rollouts.jsonl"
    (group,) = random_groups(1, prompt_tokens, [response_tokens] * 8)
    for branch in group.branches:
        branch.rollout_logprobs = np.linspace(-9, 0, response_tokens, dtype=np.float32)
    with path.open("wb") as file:
        for step in range(groups):
            file.write(format_group(step, group))
    done = validate(path)
    assert done.returncode == 0 and path.stat().st_size > 15_000_000
    assert int(re.search(r"read at (\d+) MB/s", done.stdout)[1]) >= 20
