"""The files of a run folder, and who is refused one."""
from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_longstraw.config import ConfigError, load_config, validate
from megatron_longstraw.run_log import RunLog, check_sinks, read_metrics

STEP = "training/global_step"


def config_of(folder, **options):
    return load_config(overrides={"run_dir": str(folder), "train_iters": 5} | options)


def metrics_of(score, **more):
    return {"critic/score/mean": score, "timing_s/step": 2.0, "perf/total_num_tokens": 3000.0} | more


def write(config, scores, first_step=0, **more):
    log = RunLog(config, active=True, first_step=first_step)
    for step, score in enumerate(scores, start=first_step):
        log.step(step, metrics_of(score, **more), [])
    log.close()
    return log


def scalars(folder, name):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_every_step_is_a_json_line_a_tensorboard_point_and_a_line_on_the_screen(tmp_path, capsys):
    write(config_of(tmp_path), [0.25, 0.5], **{"actor/pg_loss": math.nan})
    rows, problem = read_metrics(tmp_path / "metrics.jsonl")
    assert problem is None
    assert rows == [{STEP: i, **metrics_of(score), "actor/pg_loss": None} for i, score in enumerate([0.25, 0.5])]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text(), "which is not JSON"
    assert scalars(tmp_path, "critic/score/mean") == [(0, 0.25), (1, 0.5)]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("[####................] 1/5  reward 0.250") and "1,500 tokens/s  00:08 left" in first
    assert second.startswith("[########............] 2/5") and "00:06 left" in second


def test_a_resumed_run_goes_on_where_it_says(tmp_path):
    write(config_of(tmp_path), [0.0, 0.1, 0.2, 0.3])
    log = write(config_of(tmp_path), [0.7, 0.8], first_step=2)
    rows, _ = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row[STEP], row["critic/score/mean"]) for row in rows] == [(0, 0.0), (1, 0.1), (2, 0.7), (3, 0.8)]
    assert [step for step, _ in scalars(tmp_path, "critic/score/mean")] == [0, 1, 2, 3]
    assert log.rewards == [0.0, 0.1, 0.7, 0.8]


def test_a_new_run_in_an_old_folder_starts_anew(tmp_path):
    write(config_of(tmp_path), [0.0, 0.1, 0.2])
    write(config_of(tmp_path), [0.5])
    assert [row["critic/score/mean"] for row in read_metrics(tmp_path / "metrics.jsonl")[0]] == [0.5]
    assert scalars(tmp_path, "critic/score/mean") == [(0, 0.5)]


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    log = RunLog(config_of(tmp_path / "run"), active=False)
    log.say("hello")
    log.step(0, metrics_of(1.0), [])
    log.close()
    assert log.progress is None and not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_a_line_that_was_cut_off_is_left_out_and_said(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"training/global_step":0,"a":1.0}\n{"training/global_step":1,"a"')
    rows, problem = read_metrics(path)
    assert [row["a"] for row in rows] == [1.0]
    assert problem == "line 2 is cut off after 29 bytes and was left out"
    path.write_bytes(b'{"a": 1}\n{"training/global_step":1}\n')
    with pytest.raises(ValueError, match="line 1: is not a row of metrics"):
        read_metrics(path)


def test_what_it_ran_on_is_written_down(tmp_path):
    import torch

    write(config_of(tmp_path), [])
    found = json.loads((tmp_path / "environment.json").read_text())
    assert found["torch"] == torch.__version__ and found["python"] == sys.version.split()[0] and found["ranks"] == 1
    assert {"megatron_longstraw", "megatron-core", "device"} <= set(found)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/run.*change --run-dir"):
        RunLog(config_of(tmp_path / "file" / "run"), active=True)


def test_wandb_options_need_a_project():
    problems = validate(load_config(overrides={"wandb_exp_name": "a", "wandb_save_dir": "b"}))
    assert len(problems) == 2 and all("--wandb-project" in problem for problem in problems)


def test_without_wandb_the_package_is_named(tmp_path, monkeypatch):
    config = config_of(tmp_path / "run", wandb_project="p")
    monkeypatch.setitem(sys.modules, "wandb", None)  # what an import finds when it is not installed
    for start in (check_sinks, lambda config: RunLog(config, active=True)):
        with pytest.raises(ConfigError, match=r"megatron_longstraw\[wandb\]"):
            start(config)
    monkeypatch.setenv("RANK", "1")
    check_sinks(config)
    check_sinks(config_of(tmp_path / "run"))


def test_without_a_key_the_ways_out_are_named(tmp_path):
    """In a process of its own, since wandb keeps what it found out about keys."""
    code = (
        "from megatron_longstraw.config import load_config; from megatron_longstraw.run_log import check_sinks\n"
        "check_sinks(load_config(overrides={'wandb_project': 'p'}))"
    )
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    assert "ConfigError" in done.stderr and "WANDB_API_KEY or WANDB_MODE=offline" in done.stderr


GO_ON = """
import json, sys
from pathlib import Path
from megatron_longstraw.config import load_config
from megatron_longstraw.run_log import RunLog

folder = sys.argv[1]
for project, first_step in (("straws", 0), ("straws", 1), ("other", 1), ("other", 0)):
    log = RunLog(load_config(overrides={"run_dir": folder, "train_iters": 5, "wandb_project": project}), True, first_step)
    for step in (first_step, first_step + 1):
        log.step(step, {"critic/score/mean": 0.5, "timing_s/step": 2.0, "perf/total_num_tokens": 3.0}, [])
    log.close()
    print("id", json.loads((Path(folder) / "wandb_run.json").read_text())["id"])
"""


def test_a_resumed_run_goes_on_with_its_run_of_wandb(tmp_path):
    """Another project, or a run from the beginning in an old folder, is a new one."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "WANDB_MODE": "offline"}
    done = subprocess.run(
        [sys.executable, "-c", GO_ON, tmp_path], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    first, again, other, new = (line.removeprefix("id ") for line in done.stdout.splitlines() if line.startswith("id "))
    assert first == again and len({first, other, new}) == 3
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{first}*"))) == 2, "which `wandb sync` joins by their id"
    assert "resume" not in done.stderr
