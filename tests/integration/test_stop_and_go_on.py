"""Stopping on request between two calls, and the runs that go on from it, through the program's own entry."""
import json
import os
import signal
from pathlib import Path

import pytest

from megatron_longstraw import train
from megatron_longstraw.config import ConfigError, load_config
from megatron_longstraw.interruption import Interrupted
from megatron_longstraw.mcore.checkpoint_folder import candidates
from megatron_longstraw.rollout import generate
from tests.helpers import TINY, random_groups
from tests.orphans import assert_none_is_left

OPTIONS = TINY | dict(
    prompt_function=f"{__name__}:prompts", reward_function=f"{__name__}:reward", train_iters=4, train_batch_size=3,
    reward_error_policy="skip",
)  # fmt: skip


class Prompts:
    def prompts(self, step, num_prompts):
        return random_groups(num_prompts, [30, 20, 25], [], seed=step)

    def render(self, token_ids):
        return "".join(chr(97 + token % 26) for token in token_ids)


def prompts(config):
    return Prompts()


def reward(data_source, solution_str, ground_truth, extra_info):
    """A score with another number, none, or an error; each call leaves a line in the file that SCORED names."""
    if "SCORED" in os.environ:
        with open(os.environ["SCORED"], "a") as file:
            file.write(solution_str + "\n")
    if solution_str.endswith("c"):
        raise ValueError("no c at the end")
    score = solution_str.count("a") + 0.1 * solution_str.count("b")
    return {"score": None if solution_str.endswith("d") else score, "length": len(solution_str)}


def run(tmp_path, **options):
    """Metrics of all steps of the run folder, without times."""
    try:
        train.run(load_config(overrides=OPTIONS | {"run_dir": str(tmp_path / "run"), "save": str(tmp_path / "save")} | options))
    finally:
        path = tmp_path / "run" / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{name: value for name, value in line.items() if not name.startswith(("timing", "perf"))} for line in lines]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run(tmp_path_factory.mktemp("straight"))


def stop_at(monkeypatch, module, name, number):
    """Send the signal from inside the `number`-th call of a function."""
    original, calls = getattr(module, name), []

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            signal.raise_signal(signal.SIGUSR1)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    return calls


PLACES = {
    "capture of the first prompt": ("megatron_longstraw.algorithm", "capture", 1, 0),
    "sampling": ("megatron_longstraw.algorithm", "generate", 5, 1),
    "replay": ("megatron_longstraw.gradients", "replay", 4, 1),
    "prefix backward of the last prompt": ("megatron_longstraw.gradients", "prefix_backward", 3, 1),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_stop_loses_nothing(place, straight, tmp_path, monkeypatch):
    import importlib

    module, name, number, steps = PLACES[place]
    with monkeypatch.context() as patch:
        stop_at(patch, importlib.import_module(module), name, number)
        with pytest.raises(Interrupted):
            run(tmp_path)
    found = candidates(tmp_path / "save")
    assert [checkpoint.iteration for checkpoint in found] == [steps]
    assert run(tmp_path) == straight
    rows = [json.loads(row) for row in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert {row["step"] for row in rows} == {0, 1, 2, 3} and len(rows) == 4 * 3 * TINY["group_size"]


def test_finished_groups_are_not_sampled_again(straight, tmp_path, monkeypatch):
    from megatron_longstraw import algorithm

    with monkeypatch.context() as patch:
        stop_at(patch, algorithm, "capture", 5)  # the second prompt of the second step, which is finished then
        with pytest.raises(Interrupted):
            run(tmp_path)
    sampled = []
    original = generate.generate
    monkeypatch.setattr(
        algorithm, "generate", lambda policy, store, batch, step: sampled.append(batch) or original(policy, store, batch, step=step)
    )
    assert run(tmp_path) == straight

    assert sum(batch is None for batch in sampled) == 2, "two of the second step's three prompts were kept"


@pytest.mark.parametrize("how", ["signal", "failure"])
def test_no_response_is_scored_twice(how, straight, tmp_path, monkeypatch):
    """Stopped in the second step with a checkpoint of there and then, or failed there and back to that of the first."""
    from megatron_longstraw import algorithm

    def fail(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setenv("SCORED", str(tmp_path / "scored"))
    with monkeypatch.context() as patch:
        if how == "signal":
            stop_at(patch, algorithm, "generate", 5)
        else:
            patch.setattr(algorithm.FinishedGroups, "keep", nth_call(6, algorithm.FinishedGroups.keep, fail))
        with pytest.raises((Interrupted, ZeroDivisionError)):
            run(tmp_path, save_interval=1)
    before = (tmp_path / "scored").read_text().splitlines()
    assert len(before) == (5 if how == "signal" else 6) * TINY["group_size"]
    assert run(tmp_path, save_interval=1) == straight
    after = (tmp_path / "scored").read_text().splitlines()
    # What failed was the keeping of the sixth group, which is the one that is scored again.
    assert len(after) == (4 * 3 + (how == "failure")) * TINY["group_size"]
    assert {name for row in straight for name in row} >= {"reward/length", "reward/failed", "reward/abstained"}
    assert sum(row["reward/failed"] for row in straight) > 0 < sum(row["reward/abstained"] for row in straight)


def test_another_reward_function_scores_anew(tmp_path, monkeypatch):
    from megatron_longstraw import algorithm

    monkeypatch.setenv("SCORED", str(tmp_path / "scored"))
    with monkeypatch.context() as patch:
        stop_at(patch, algorithm, "generate", 5)
        with pytest.raises(Interrupted):
            run(tmp_path)
    run(tmp_path, train_iters=2, reward_error_policy="zero")
    assert len((tmp_path / "scored").read_text().splitlines()) == (5 + 3) * TINY["group_size"]


def nth_call(number, original, instead):
    """A function that becomes another one at its `number`-th call."""
    calls = []
    return lambda *args, **kwargs: (instead if calls.append(1) or len(calls) == number else original)(*args, **kwargs)


def test_checkpoints_that_are_kept(tmp_path):
    run(tmp_path, train_iters=6, save_interval=1, max_ckpt_to_keep=2, save_retain_interval=3)
    assert [checkpoint.iteration for checkpoint in candidates(tmp_path / "save")] == [6, 5, 3]
    assert sorted(path.name for path in (tmp_path / "save").iterdir()) == [
        "in_progress", "iter_0000003", "iter_0000005", "iter_0000006", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


def test_a_damaged_checkpoint_is_passed_over(straight, tmp_path, capsys):
    run(tmp_path, train_iters=3, save_interval=1)
    (newest, before, _) = candidates(tmp_path / "save")
    path = max(newest.path.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (before.path / ".metadata").unlink()
    capsys.readouterr()
    assert run(tmp_path) == straight
    printed = capsys.readouterr().out
    assert "iter_0000003 is damaged" in printed and "checksum" in printed and ".metadata is missing" in printed
    assert "goes on after step 1" in printed


def test_when_all_are_damaged_nothing_is_trained(tmp_path):
    run(tmp_path, train_iters=1)
    (only,) = candidates(tmp_path / "save")
    (only.path / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="no whole checkpoint is left"):
        run(tmp_path)


def test_resume_modes(straight, tmp_path):
    run(tmp_path, train_iters=2)
    with pytest.raises(ConfigError, match="--resume-mode disable would mix two runs"):
        run(tmp_path, resume_mode="disable")
    other = tmp_path / "other"
    assert run(other, resume_mode="resume_path", load=str(tmp_path / "save"))[-2:] == straight[2:]
    fresh = run(tmp_path / "fresh", finetune=True, load=str(tmp_path / "save"))
    assert len(fresh) == 4 and fresh[0] != straight[0], "other weights, from the first step on"


def test_a_folder_that_cannot_be_written_stops_with_the_last_checkpoint_kept(tmp_path, monkeypatch):
    from megatron_longstraw.mcore import checkpoint_folder
    from megatron_longstraw.mcore.training_state import CheckpointError

    run(tmp_path, train_iters=1)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "begin", full)
        with pytest.raises(CheckpointError, match="step 2 cannot be written.*No space left on device.*--save"):
            run(tmp_path, train_iters=2)
    assert [checkpoint.iteration for checkpoint in candidates(tmp_path / "save")] == [1]


SAVES_AND_DIES = """
from megatron_longstraw.mcore.checkpoint import save_weights
from tests.helpers import tiny_policy

if __name__ == "__main__":
    save_weights(tiny_policy().chunks, sys.argv[1], "")
    die()
"""


def test_nothing_of_a_killed_rank_is_left(tmp_path):
    """Megatron's writer has a process of its own for results."""
    assert_none_is_left(SAVES_AND_DIES, tmp_path, tmp_path / "checkpoints")
