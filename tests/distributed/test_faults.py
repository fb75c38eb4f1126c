"""Ranks that disagree, hang, wait too long, or share a disk that fails."""
import shutil
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_longstraw import train
from megatron_longstraw.agreement import check_ranks_agree
from megatron_longstraw.config import ConfigError, load_config
from megatron_longstraw.disk import DiskError
from megatron_longstraw.interruption import Interrupted
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.checkpoint_folder import candidates
from tests.distributed.launch import run_ranks
from tests.helpers import TINY, random_groups


def disagree(rank, options, seed):
    """What each rank is told about the others."""
    config = load_config(overrides=TINY | (options if rank else {}))
    try:
        check_ranks_agree(config, random_groups(2, 10, [], seed=seed if rank else 0))
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("options", "seed", "words"),
    [({}, 0, []), ({"lr": 0.5}, 0, ["rank 1 has other configuration"]), ({}, 3, ["rank 1 has other prompts"])],
)
def test_ranks_that_disagree_are_found_at_the_start(options, seed, words):
    for problems in run_ranks(disagree, 2, options, seed):
        assert len(problems) == len(words) and all(word in problem for word, problem in zip(words, problems))


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
