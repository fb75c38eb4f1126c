"""What real runs log: every metric that docs/metrics.md defines and no other, wherever it is sent, and nothing secret."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_longstraw import PromptGroup, load_config, train
from megatron_longstraw.run_log import read_metrics
from tests.helpers import TINY, tiny_policy

ROOT = Path(__file__).parents[2]
PROMPT_TOKENS = 100
CHUNKS = [32, 32, 32, 3]
"""Of the prompt without its last token."""


class Prompts:
    def prompts(self, step, num_prompts):
        rng = np.random.default_rng(step)
        return [PromptGroup(rng.integers(0, 60, PROMPT_TOKENS), group_id=f"{step}-{i}") for i in range(num_prompts)]

    def render(self, ids):
        return " ".join(map(str, ids))


def task(config):
    return Prompts()


def reward(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(len(solution_str) % 3), "KEY": 0.5}


RUN = TINY | {"prompt_function": f"{__name__}:task", "reward_function": f"{__name__}:reward", "train_iters": 2}


def run(folder, **options):
    train.run(load_config(overrides=RUN | {"run_dir": str(folder)} | options))
    return read_metrics(folder / "metrics.jsonl")[0]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """By kind of run."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "one update": run(folder / "one"),
        "several": run(folder / "several", ppo_epochs=2),
        "full": run(folder / "full", schedule="full"),
        "host": run(folder / "host", prefix_kv_tier="host", prefix_out_tier="host", train_iters=1),
    }


def test_the_documentation_defines_every_metric_and_no_other(rows):
    section = (ROOT / "docs/metrics.md").read_text().partition("| metric | what |")[2].partition("\n\n")[0]
    defined = [name for line in section.splitlines() for name in re.findall(r"`([^`]+)`", line.split("|")[1:2][0] if "|" in line else "")]
    assert len(defined) == len(set(defined)) > 30
    assert set(defined) == {name for kind in rows.values() for row in kind for name in row}


def test_what_was_saved(rows):
    for row in rows["one update"]:
        once, dense = 2 * 2 * sum(CHUNKS), 2 * 4 * sum(CHUNKS)  # two prompts, captured and walked back; four responses
        assert (row["prefix/tokens_once"], row["prefix/tokens_dense"]) == (once, dense)
        assert row["prefix/saved_fraction"] == pytest.approx(0.5)
        handled = 2 * 4 * (PROMPT_TOKENS + row["response_length/mean"])
        assert row["perf/total_num_tokens"] == pytest.approx(handled)
        assert row["perf/throughput"] == pytest.approx(handled / row["timing_s/step"])
        calls = sum(value for name, value in row.items() if name.startswith("timing_s/")) - row["timing_s/step"]
        assert 0 < calls <= row["timing_s/step"]
        assert 0.05 < row["perf/max_memory_allocated_gb"] < 8


def test_state_bytes_are_those_of_all_prompts_held_at_once(rows):
    """K and V of 2 layers with 2 heads of 8 in float32; the attention outputs (4 heads of 8, and lse; the last layer has
    none) of both prompts; and the gradients of K and V of the one being updated."""
    kv, kept = 2 * 2 * 2 * 8 * 4, 4 * (8 + 1) * 4
    for kind in ("one update", "several"):
        for row in rows[kind]:
            assert row["prefix/state_bytes"] == sum(CHUNKS) * (2 * (kv + kept) + kv)


def test_host_bytes_are_reported_where_they_are_used(rows):
    (on_host,) = rows["host"]
    assert on_host["prefix/state_bytes"] == 0
    assert on_host["prefix/host_bytes"] == rows["one update"][0]["prefix/state_bytes"]
    assert "prefix/host_bytes" not in rows["one update"][0]


class Heard:
    def __init__(self):
        self.events = []

    def progress(self, phase, done, total):
        self.events.append((phase, done, total))

    def end(self, phase):
        self.events.append((phase, None, None))


def test_a_capture_tells_its_chunks():
    from megatron_longstraw.mcore.calls import capture
    from megatron_longstraw.mcore.packing import PromptBatch

    policy, heard = tiny_policy(), Heard()
    policy.meter.watcher = heard
    groups = Prompts().prompts(0, 2)
    capture(policy, PromptBatch(groups)).release()
    *begun, (last, done, _) = heard.events
    assert (last, done) == ("capture", None) and {phase for phase, *_ in begun} == {"capture"}
    starts = [0, 32, 64, 96]
    assert [(done.parts, done.tokens) for _, done, _ in begun] == [(i, 2 * start) for i, start in enumerate(starts)]
    pairs = [2 * n * (start + n / 2) for start, n in zip(starts, CHUNKS)]
    assert [done.pairs for _, done, _ in begun] == [int(sum(pairs[:i])) for i in range(4)]
    assert {(total.parts, total.tokens, total.pairs) for *_, total in begun} == {(4, 198, int(sum(pairs)))}


def test_a_step_tells_its_phases(tmp_path):
    from megatron_longstraw.run_log import RunLog

    options = RUN | {"train_iters": 1, "ppo_epochs": 2, "branches_per_microbatch": 2, "run_dir": str(tmp_path)}
    policy, heard = tiny_policy(**options), Heard()
    log = RunLog(policy.config, active=False)
    log.progress = heard
    train.train(policy, Prompts(), log)
    totals = {phase: total.parts for phase, _, total in heard.events if total}
    assert totals == {
        "sample": 2, "capture": 4, "rollout": 8, "score": 2, "update": 2, "replay": 2, "prefix_backward": 4,
    }  # fmt: skip
    open_phases = []
    for phase, done, total in heard.events:
        if done is None:
            assert open_phases[-1:] == [phase] or phase not in open_phases
            open_phases = [name for name in open_phases if name != phase]
        else:
            assert done.parts < total.parts
            open_phases += [] if phase in open_phases else [phase]
    assert open_phases == []


KEY = "0123456789abcdef" * 2 + "01234567"
SECRETS = {"WANDB_API_KEY": KEY} | {
    name: f"secret-of-{name}" for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY")
}


def test_wandb_offline_gets_the_metrics_and_no_key_reaches_a_file(tmp_path):
    flags = {name: value for name, value in RUN.items()} | {
        "run_dir": "run", "wandb_project": "straws", "wandb_exp_name": "first", "save": "save",
    }  # fmt: skip
    argv = [text for name, value in flags.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_longstraw.train", *argv],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", **SECRETS},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = re.findall(r"^wandb      wandb sync (run/wandb/offline-run-\S+)$", done.stdout, re.M)
    (store,) = (tmp_path / line).glob("*.wandb")
    sent = store.read_bytes()
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl")[0]:
        assert [name for name in row if name != "training/global_step" and name.encode() not in sent] == []
        for name in ("timing_s/capture", "actor/grad_norm", "actor/entropy"):
            assert repr(row[name]).encode() in sent, name
    assert b"straws" in sent and b"first" in sent and b"prefix_chunk_tokens" in sent
    report = subprocess.run(
        [sys.executable, ROOT / "tools/report.py", "run"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": path, **SECRETS},
    )  # fmt: skip
    assert report.returncode == 0 and (tmp_path / "run/report.html").exists(), report.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    screen = done.stdout + done.stderr + report.stdout + report.stderr
    assert len(files) > 6
    for secret in SECRETS.values():
        assert [path for path in files if secret.encode() in path.read_bytes()] == [] and secret not in screen
