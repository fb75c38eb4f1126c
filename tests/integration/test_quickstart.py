"""The quickstart: what it prints, leaves behind and answers to a typing error (tiny), and that it learns (slow)."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.needle.task import ANSWER_TOKENS
from megatron_longstraw.config import load_config

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "needle" / "train.py"
CONFIG = TRAIN.with_name("quickstart.toml")
TINY = {"train_iters": 2, "max_prompt_length": 64, "lr_warmup_iters": 0}
EXPECTED = load_config([CONFIG], {**TINY, "run_dir": "run"}).resolve()
PROMPTS = EXPECTED.algorithm.train_batch_size
PREFIX_TOKENS = PROMPTS * (TINY["max_prompt_length"] - 1)
"""Shared by the responses of one step: the last token of a prompt goes with each response."""
RESPONSES = PROMPTS * EXPECTED.rollout.group_size
METRICS = {
    "training/global_step",
    "critic/score/mean",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/lr",
    "response_length/mean",
    "prefix/tokens_once",
    "prefix/tokens_dense",
    "reward/all_right",
    "timing_s/step",
    "timing_s/capture",
    "timing_s/rollout",
    "timing_s/replay",
    "timing_s/prefix_backward",
}


def start(command: list, folder: Path, timeout_s: float) -> subprocess.CompletedProcess:
    """Runs in a folder of its own, because a user's folder need not be the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = start(
        [*torchrun, TRAIN, "--config", CONFIG, "--warmup-curriculum", "16:2:4", "--run-dir", "run", *flags], folder, 600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done, folder / "run"


@pytest.mark.dist
def test_printed_summary(tiny_run):
    done, _ = tiny_run
    lines = done.stdout.splitlines()
    assert lines[0].startswith("layout     cp2 on ")
    assert lines[1].startswith("warm-up      16-token prompts, 2 steps of 4: entropy ")
    assert [line.partition("  ")[0] for line in lines[2:4]] == ["[##########..........] 1/2", "[####################] 2/2"]
    summary = "\n".join(lines[4:])
    captured, sampled = (f"{2 * tokens:,} tokens" for tokens in (PREFIX_TOKENS, RESPONSES * ANSWER_TOKENS))
    dense = PREFIX_TOKENS * EXPECTED.rollout.group_size
    for pattern in (
        rf"prompts    {4 * PREFIX_TOKENS:,} prompt tokens run .* {2 * dense:,} forward and backward",
        r"reward     first 2 steps 0\.\d{3}   last 2 steps 0\.\d{3}",
        rf"capture +\d+\.\d\d s +{captured}",
        rf"rollout +\d+\.\d\d s +{sampled}",
        rf"replay +\d+\.\d\d s +{sampled}",
        rf"prefix_backward +\d+\.\d\d s +{captured}",
        r"memory     peak [1-9]\d* MiB on rank 0",
        r"metrics    run/metrics\.jsonl",
        r"curve      run/reward\.png",
        r"time       \d+ s of training, warm-up included",
    ):
        assert re.search(f"^{pattern}$", summary, re.M), f"{pattern} not in\n{summary}"


@pytest.mark.dist
def test_files(tiny_run):
    _, folder = tiny_run
    assert load_config([folder / "config.toml"]) == EXPECTED
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["training/global_step"] for row in rows] == [0, 1]
    for row in rows:
        assert METRICS <= set(row)
        assert row["prefix/tokens_once"] == 2 * PREFIX_TOKENS
        assert row["prefix/tokens_dense"] == PREFIX_TOKENS * EXPECTED.rollout.group_size
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_wrong_flag_ends_with_the_closest_name(tmp_path):
    done = start([sys.executable, TRAIN, "--config", CONFIG, "--contxt-parallel-size", "2"], tmp_path, 300)
    assert (done.returncode, done.stdout) == (1, "")
    assert "unknown flag --contxt-parallel-size; did you mean --context-parallel-size" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_quickstart_learns_within_five_minutes(seed, tmp_path):
    done = start(["bash", ROOT / "launch" / "quickstart.sh", "--seed", seed, "--run-dir", "run"], tmp_path, 840)
    assert done.returncode == 0, done.stderr[-4000:]
    first, last = map(float, re.search(r"^reward     first 5 steps (\S+)   last 5 steps (\S+)$", done.stdout, re.M).groups())
    seconds = float(re.search(r"^time       (\d+) s of training", done.stdout, re.M).group(1))
    assert first <= 0.5
    assert last >= 0.9
    assert seconds <= 300
    # Only ours: what third parties announce on every rank is filtered out.
    assert "Warning" not in done.stderr, done.stderr[-4000:]
