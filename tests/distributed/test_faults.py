"""Ranks that disagree, hang, wait too long, or share a disk that fails."""
import json
import os
import re
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_longstraw import train
from megatron_longstraw.agreement import PACKAGE, check_ranks_agree
from megatron_longstraw.config import ConfigError, load_config
from megatron_longstraw.disk import DiskError
from megatron_longstraw.interruption import Interrupted
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.checkpoint_folder import candidates
from megatron_longstraw.train import TrainingStopped, run
from tests.distributed.launch import run_ranks
from tests.helpers import TINY, random_groups


def disagree(rank, options, seed, function):
    """What each rank is told about the others."""
    config = load_config(overrides=TINY | (options if rank else {}))
    try:
        check_ranks_agree(config, random_groups(2, 10, [], seed=seed if rank else 0), [function if rank else b""])
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("options", "seed", "function", "words"),
    [
        ({}, 0, b"", []),
        ({"lr": 0.5}, 0, b"", ["rank 1 has other configuration"]),
        ({}, 3, b"", ["rank 1 has other prompts"]),
        ({}, 0, b"def score(): ...", ["rank 1 has other functions"]),
    ],
)
def test_ranks_that_disagree_are_found_at_the_start(options, seed, function, words):
    for problems in run_ranks(disagree, 2, options, seed, function):
        assert len(problems) == len(words) and all(word in problem for word, problem in zip(words, problems))


OTHER_CODE = """
import sys
import torch.distributed as dist
from megatron_longstraw.agreement import check_ranks_agree
from megatron_longstraw.config import ConfigError, load_config

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
try:
    check_ranks_agree(load_config(), [])
except ConfigError as error:
    print(error, flush=True)
dist.barrier()
"""


@pytest.mark.parametrize("changed", [True, False])
def test_another_version_of_the_package_is_found_at_the_start(changed, tmp_path):
    """A copy of the package with one line changed, as of a node that was not updated."""
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    if changed:
        with (tmp_path / PACKAGE.name / "objectives/advantages.py").open("a") as file:
            file.write("# another version\n")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", OTHER_CODE, tmp_path / "meeting", str(rank)],
            cwd=path, env=os.environ | {"PYTHONPATH": str(path)}, stdout=subprocess.PIPE, text=True,
        )
        for rank, path in enumerate((PACKAGE.parent, tmp_path))
    ]  # fmt: skip
    for rank in ranks:
        output, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0
        assert ("rank 1 has other code than rank 0; install the same version" in output) == changed
        assert output.count("has other") == changed


def not_finite(rank, folder, options):
    """What a run stops with, and what the run of its kept step stops with."""
    from tests.integration import test_nonfinite as case

    own = dict(prompt_function=f"{case.__name__}:task", reward_function=f"{case.__name__}:reward", run_dir=f"{folder}/run")
    own |= dict(norm_adv_by_std_in_grpo=False, nonfinite_policy="stop", train_iters=3, save=f"{folder}/save", save_interval=1)
    kept = Path(folder) / "run/nonfinite_step_000002"
    messages = []
    for config in (lambda: load_config(overrides=TINY | own | options), lambda: load_config([kept / "config.toml"])):
        with pytest.raises(TrainingStopped) as error:
            run(config())
        messages.append(str(error.value))
    return messages


@pytest.mark.parametrize("layout", [dict(tensor_model_parallel_size=2), dict(pipeline_model_parallel_size=2), {}], ids=["tp2", "pp2", "dp2"])
def test_a_step_that_is_not_finite_is_kept_of_all_ranks(layout, tmp_path):
    first, second = run_ranks(not_finite, 2, str(tmp_path), layout)
    assert first == second
    kept = tmp_path / "run/nonfinite_step_000002"
    found, again = (json.loads((f / "report.json").read_text()) for f in (kept, kept / "replay/nonfinite_step_000000"))
    assert (found["gradients"], found["tables"]) == (again["gradients"], again["tables"])
    assert {"decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc1.weight"} <= set(found["gradients"])
    rows = [json.loads(line) for line in (kept / "rollouts.jsonl").read_text().splitlines()]
    assert [row["group_id"] for row in rows] == [0] * TINY["group_size"] + [1] * TINY["group_size"]
    replay = (kept / "replay.sh").read_text().splitlines()[-1]
    assert "-m megatron_longstraw.agent --standalone --nproc-per-node=2 -m megatron_longstraw.train --config" in replay


def wait_for_a_late_rank(rank, late_s):
    """Which groups failed within the timeout, when the last rank comes late to each."""
    config = load_config(overrides=TINY | dict(context_parallel_size=2, distributed_timeout_minutes=4 / 60)).resolve()
    layout = parallel.initialize(config)
    groups = {"dp": layout.groups.dp_cp, "cp": layout.groups.cp, "cell": layout.cell}
    failed = []
    for name, group in groups.items():
        if rank == 1:
            time.sleep(late_s)
        try:
            dist.all_reduce(torch.zeros(1), group=group)
        except RuntimeError as error:
            assert "imed out" in str(error) or "closed" in str(error) or "reset" in str(error), error
            failed.append(name)
    timeouts = {name: group._get_backend(torch.device("cpu")).options._timeout for name, group in groups.items()}
    return failed, timeouts


def test_the_timeout_reaches_every_group():
    """K07"""
    for failed, timeouts in run_ranks(wait_for_a_late_rank, 2, 1.0):
        assert failed == [] and set(timeouts.values()) == {timedelta(seconds=4)}
    assert run_ranks(wait_for_a_late_rank, 2, 7.0)[0][0] == ["dp", "cp", "cell"]


HANG = """
import sys, time
from megatron_longstraw import watchdog
watchdog.GRACE_S = 0.0
dog = watchdog.Watchdog(1.0)
for _ in range(4):
    dog.alive()
    time.sleep(0.5)
print("still here", flush=True)
def where_it_hangs():
    time.sleep(60)
where_it_hangs()
"""


def test_a_process_without_progress_ends_and_shows_where():
    done = subprocess.run([sys.executable, "-c", HANG], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and done.stdout == "still here\n"
    assert "where_it_hangs" in done.stderr and "Timeout" in done.stderr


SLEEPY = """
import os, time
import numpy as np
from megatron_longstraw import PromptGroup

class Prompts:
    def prompts(self, step, num_prompts):
        return [PromptGroup(np.arange(20), group_id=number) for number in range(num_prompts)]

    def render(self, ids):
        return ""

def task(config):
    return Prompts()

def score(**_):
    server_that_does_not_answer()

def server_that_does_not_answer():
    time.sleep(3600)
"""


def test_a_reward_function_that_never_answers_ends_with_the_stacks_of_all_ranks(tmp_path):
    """Rank 0 is in the user's function, rank 1 waits for what comes out of it."""
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    options = TINY | dict(
        prompt_function="sleepy:task", reward_function="sleepy:score", run_dir="run", context_parallel_size=2,
        distributed_timeout_minutes=0.25, train_batch_size=1,
    )  # fmt: skip
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    begin = time.monotonic()
    done = subprocess.run(
        [*torchrun, "-m", "megatron_longstraw.train", *flags],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": f"{PACKAGE.parent}:{tmp_path}"}, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode != 0 and time.monotonic() - begin < 200
    sleeping = done.stderr.partition("Timeout (0:00:20)!")[2]
    assert 'sleepy.py", line 20 in server_that_does_not_answer' in sleeping, done.stderr[-6000:]
    waiting, _, reason = done.stderr.partition("RuntimeError: ")
    assert re.search(r'rollout/scoring\.py", line \d+, in score', waiting) and "imed out" in reason.splitlines()[0]


class PromptsThatLoseTheRunFolder:
    """In the second step it is gone."""

    def __init__(self, run_dir):
        self.run_dir = run_dir

    def prompts(self, step, num_prompts):
        if step == 1 and dist.get_rank() == 0:
            shutil.rmtree(self.run_dir)
        return random_groups(num_prompts, [30, 20], [], seed=step)

    def render(self, token_ids):
        return "".join(chr(97 + token % 26) for token in token_ids)


def prompts(config):
    return PromptsThatLoseTheRunFolder(config.run.run_dir)


def train_until_it_stops(rank, folder):
    options = dict(
        prompt_function=f"{__name__}:prompts", reward_function="tests.training_runs:score", train_iters=3,
        run_dir=f"{folder}/run", save=f"{folder}/save",
    )  # fmt: skip
    try:
        train.run(load_config(overrides=TINY | options))
    except (DiskError, Interrupted) as error:
        return type(error).__name__, str(error)


def test_a_run_folder_that_is_lost_stops_all_ranks_with_a_checkpoint(tmp_path):
    """It is written by one rank; one says why, and none waits for another."""
    first, second = run_ranks(train_until_it_stops, 2, tmp_path)
    assert first[0] == "DiskError" and "No such file" in first[1] and "--run-dir" in first[1]
    assert second == ("Interrupted", "asked to stop")
    (newest,) = candidates(tmp_path / "save")
    assert newest.iteration == 1 and newest.damage() is None
