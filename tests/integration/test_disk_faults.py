"""Disks that are full, read-only or gone: one error that names path, cause and flag, and nothing half that looks whole.

The disks are real: file systems of a few MB in memory, filled, remounted or emptied in the middle of a run.
"""
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_longstraw import train
from megatron_longstraw.config import ConfigError, load_config
from megatron_longstraw.convert.safetensors_files import TensorFilesWriter
from megatron_longstraw.disk import DiskError
from megatron_longstraw.mcore.checkpoint_folder import candidates
from megatron_longstraw.mcore.optimizer import PolicyOptimizer
from megatron_longstraw.mcore.training_state import CheckpointError
from tests.helpers import TINY, random_groups
from tests.hf_models import make_folder

STEPS = 3
DISK_MB = 64
OPTIONS = TINY | dict(
    prompt_function=f"{__name__}:prompts", reward_function=f"{__name__}:reward", train_iters=STEPS, train_batch_size=3
)
FULL, READ_ONLY, GONE = "No space left on device", "Read-only file system", "No such file or directory"


class Accident:
    """What happens in a step: before its prompts are captured, when its responses are scored, or after its update."""

    def __init__(self):
        self.step, self.when, self.what = -1, "", lambda: None

    def at(self, step, when, what):
        self.step, self.when, self.what = step, when, what

    def happens(self, step, when):
        if (step, when) == (self.step, self.when):
            self.what()
            self.step = -1  # once

    now = 0
    """The step that runs."""


accident = Accident()


class Prompts:
    def prompts(self, step, num_prompts):
        accident.now = step
        accident.happens(step, "prompts")
        return random_groups(num_prompts, [30, 20, 25], [], seed=step)

    def render(self, token_ids):
        return "".join(chr(97 + token % 26) for token in token_ids)


def prompts(config):
    return Prompts()


def reward(data_source, solution_str, ground_truth, extra_info):
    accident.happens(accident.now, "reward")
    return solution_str.count("a") + 0.1 * solution_str.count("b")


@pytest.fixture(autouse=True)
def no_accident(monkeypatch):
    accident.at(-1, "", None)
    update = PolicyOptimizer.step

    def step(optimizer):
        result = update(optimizer)
        accident.happens(accident.now, "update")
        return result

    monkeypatch.setattr(PolicyOptimizer, "step", step)


def mount(*arguments):
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path):
    """A folder that is a file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a file system takes root")
    try:
        mount("-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", folder)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {getattr(error, 'stderr', None) or error}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(disk):
    with (disk / "filler").open("wb") as file:
        try:
            while True:
                file.write(bytes(2**20))
                file.flush()
        except OSError:
            pass
    # To the last byte, whatever size the disk's blocks are.
    with (disk / "filler").open("ab", buffering=0) as file:
        try:
            while file.write(bytes(512)):
                pass
        except OSError:
            pass


def break_disk(how, disk):
    if how == FULL:
        fill(disk)
    elif how == READ_ONLY:
        mount("-o", "remount,ro", disk)
    else:
        for path in disk.iterdir():
            shutil.rmtree(path)


def mend(how, disk):
    if how == FULL:
        (disk / "filler").unlink()
    elif how == READ_ONLY:
        mount("-o", "remount,rw", disk)


def run(folder, **options):
    """The metrics in the run folder, without times."""
    options = {"run_dir": str(folder / "run"), "save": str(folder / "save"), "save_interval": 1} | options
    train.run(load_config(overrides=OPTIONS | options))
    lines = map(json.loads, (Path(options["run_dir"]) / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if not name.startswith(("timing", "perf"))} for line in lines]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run(tmp_path_factory.mktemp("straight"))


def one_line(error):
    return "\n" not in str(error)


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("how", [FULL, READ_ONLY, GONE])
def test_checkpoints_on_a_disk_that_fails(how, async_save, disk, straight, tmp_path):
    """Noticed when the checkpoint of step 2 is written; the one before it is whole, and a run goes on from it."""
    accident.at(1, "update", lambda: break_disk(how, disk))
    options = dict(save=str(disk / "save"), async_save=async_save)
    with pytest.raises(CheckpointError) as failed:
        run(tmp_path, **options)
    assert "checkpoint of step" in str(failed.value) and how in str(failed.value) and "--save" in str(failed.value)
    assert str(disk / "save") in str(failed.value) and one_line(failed.value)
    found = candidates(disk / "save")
    # Written in the background, that of step 1 is named in step 2, which the failure may forestall.
    possible = [[]] if how == GONE else [[1], []] if async_save else [[1]]
    assert [checkpoint.iteration for checkpoint in found] in possible
    assert all(checkpoint.damage() is None for checkpoint in found)
    assert how == READ_ONLY or not list((disk / "save").glob(".iter*")), "nothing half is left to take up room"
    mend(how, disk)
    rest = run(tmp_path, **options)
    assert rest == straight[-len(rest) :] and len(rest) >= 2
    assert not list((disk / "save").glob(".iter*"))


@pytest.mark.parametrize("how", [READ_ONLY, GONE])
def test_finished_groups_on_a_disk_that_fails(how, disk, straight, tmp_path):
    """On a full disk they have the room of the last step's, which are removed first."""
    accident.at(1, "prompts", lambda: break_disk(how, disk))
    with pytest.raises(DiskError) as failed:
        run(tmp_path, save=str(disk / "save"))
    assert f"{disk / 'save' / 'in_progress'} cannot be written: {how}" in str(failed.value)
    assert "--save" in str(failed.value) and one_line(failed.value)
    mend(how, disk)
    assert run(tmp_path, save=str(disk / "save")) == straight


@pytest.mark.parametrize("how", [FULL, READ_ONLY, GONE])
@pytest.mark.parametrize("async_save", [False, True])
def test_a_run_folder_on_a_disk_that_fails(how, async_save, disk, straight, tmp_path):
    """The run stops with a checkpoint of all it has done, and goes on from it."""
    accident.at(1, "reward", lambda: break_disk(how, disk))
    options = dict(run_dir=str(disk / "run"), save_interval=None, async_save=async_save)
    with pytest.raises(DiskError) as failed:
        run(tmp_path, **options)
    assert how in str(failed.value) and str(disk / "run") in str(failed.value) and "--run-dir" in str(failed.value)
    assert one_line(failed.value)
    (saved,) = candidates(tmp_path / "save")
    assert saved.iteration in (1, 2) and saved.damage() is None
    mend(how, disk)
    rest = run(tmp_path, **options)
    assert rest[-1] == straight[-1]
    assert [row for row in straight if row in rest] == rest, "rows that could not be written are missing, no other"


@pytest.mark.parametrize("flag", ["save", "run_dir", "save_hf"])
@pytest.mark.parametrize("how", [FULL, READ_ONLY])
def test_a_disk_that_cannot_be_written_is_found_before_anything_is_computed(how, flag, disk, source, tmp_path):
    accident.at(0, "prompts", lambda: pytest.fail("the run has begun"))
    break_disk(how, disk)
    with pytest.raises(ConfigError, match=f"{how}.*--{flag.replace('_', '-')}"):
        if flag == "save_hf":
            hf_run(tmp_path, source, disk / "some" / "folder")
        else:
            run(tmp_path, **{flag: str(disk / "some" / "folder")})
    assert sorted(path.name for path in disk.iterdir()) == (["filler"] if how == FULL else [])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_folder("qwen2 tied", tmp_path_factory.mktemp("hf") / "model", vocab_size=TINY["vocab_size"])


def hf_run(folder, source, target):
    model = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "vocab_size")
    options = {name: value for name, value in OPTIONS.items() if name not in (*model, "init_method_std")}
    options |= dict(hf_checkpoint=str(source), save_hf=str(target))
    options |= dict(run_dir=str(folder / "run"), save=str(folder / "save"))
    train.run(load_config(overrides=options))


create = TensorFilesWriter.create


def create_and_lose(writer):
    create(writer)
    shutil.rmtree(writer.folder.parent)


@pytest.mark.parametrize("how", [FULL, READ_ONLY, GONE])
def test_an_export_to_a_disk_that_fails(how, disk, source, tmp_path, monkeypatch):
    """No folder that looks whole, and the same command exports what was trained, without training again."""
    (disk / "models").mkdir()
    target = disk / "models" / "mine"
    if how == GONE:  # in the middle of the export, when the folder has been made
        monkeypatch.setattr(TensorFilesWriter, "create", create_and_lose)
    else:
        accident.at(STEPS - 1, "reward", lambda: break_disk(how, disk))
    with pytest.raises(DiskError) as failed:
        hf_run(tmp_path, source, target)
    monkeypatch.undo()
    assert f"{target} cannot be written: {how}" in str(failed.value) and "--save-hf" in str(failed.value)
    assert one_line(failed.value) and not target.exists()
    mend(how, disk)
    if how != GONE:
        assert list((disk / "models").iterdir()) == []
    accident.at(STEPS - 1, "prompts", lambda: pytest.fail("trained again"))
    hf_run(tmp_path, source, target)
    assert (target / "model.safetensors").stat().st_size == (source / "model.safetensors").stat().st_size


def test_an_export_that_has_no_room_is_refused_before_training(disk, source, tmp_path):
    fill(disk)
    with (disk / "filler").open("r+b") as file:
        file.truncate((disk / "filler").stat().st_size - 2**16)
    with pytest.raises(ConfigError, match=r"bytes free, need [\d,]+; make room or change --save-hf"):
        hf_run(tmp_path, source, disk / "mine")
