"""Stopping on request between two calls, and the runs that go on from it, through the program's own entry."""
import json
import signal

import pytest

from megatron_longstraw import train
from megatron_longstraw.config import ConfigError, load_config
from megatron_longstraw.interruption import Interrupted
from megatron_longstraw.mcore.checkpoint_folder import candidates
from megatron_longstraw.rollout import generate
from tests.helpers import TINY, random_groups

OPTIONS = TINY | dict(
    prompt_function=f"{__name__}:prompts", reward_function=f"{__name__}:reward", train_iters=4, train_batch_size=3
)


class Prompts:
    def prompts(self, step, num_prompts):
        return random_groups(num_prompts, [30, 20, 25], [], seed=step)

    def render(self, token_ids):
        return "".join(chr(97 + token % 26) for token in token_ids)


def prompts(config):
    return Prompts()


def reward(data_source, solution_str, ground_truth, extra_info):
    return solution_str.count("a") + 0.1 * solution_str.count("b")


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
