"""tools/submit_slurm.py up to the script that it would hand to sbatch."""
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import submit_slurm

from megatron_longstraw.config import SETTINGS
from megatron_longstraw.slurm import address_of

TRAINING = ["--prompt-function", "mytask:task", "--save", "a folder"]


def dry_run(capsys, *argv, training=TRAINING):
    code = submit_slurm.main(["--dry-run", *argv, "--", *training])
    return code, *capsys.readouterr()


def header(script):
    """sbatch flags, as sbatch splits them."""
    lines = re.findall(r"^#SBATCH (.*)$", script.partition("\nset -euo")[0], re.M)
    words = [word for line in lines for word in shlex.split(line)]
    return dict(word.removeprefix("--").partition("=")[::2] for word in words)


def test_the_script_holds_what_was_asked_for(capsys):
    flags = ["--nodes", "2", "--gpus-per-node", "4", "--cpus-per-task", "32", "--mem", "200G", "--time", "1-12",
             "--partition", "gpu", "--account", "me", "--qos", "long", "--job-name", "my job", "--output", "logs/%j.out",
             "--signal-minutes", "5"]  # fmt: skip
    code, script, planned = dry_run(capsys, *flags)
    assert code == 0 and "cp8 on 8 ranks" in planned
    assert header(script) == {
        "nodes": "2", "gpus-per-node": "4", "cpus-per-task": "32", "mem": "200G", "time": "1-12", "partition": "gpu",
        "account": "me", "qos": "long", "job-name": "my job", "output": "logs/%j.out", "signal": "B:USR1@300",
        "ntasks-per-node": "1", "requeue": "", "open-mode": "append",
    }  # fmt: skip
    (arguments,) = re.findall(r"^set -- (.*)$", script, re.M)
    assert shlex.split(arguments) == [*TRAINING, "--nproc-per-node", "4"]
    assert "CONTAINER_IMAGE=" not in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_training_flags_need_no_separator(capsys):
    assert submit_slurm.main(["--dry-run", "--nodes", "2", *TRAINING]) == 0
    assert "set -- --prompt-function mytask:task --save 'a folder' --nproc-per-node 8\n" in capsys.readouterr().out


def test_ranks_without_gpus(capsys):
    _, script, planned = dry_run(capsys, "--nodes", "2", "--gpus-per-node", "0")
    assert "gpus-per-node" not in header(script) and "cp4 on 4 ranks" in planned
    _, _, planned = dry_run(capsys, "--gpus-per-node", "0", training=[*TRAINING, "--nproc-per-node=3"])
    assert "cp3 on 3 ranks" in planned


def test_a_container(capsys):
    _, script, _ = dry_run(capsys, "--container-image", "an image.sqsh", "--container-mounts", "/data:/data")
    assert "CONTAINER_IMAGE='an image.sqsh'\nCONTAINER_MOUNTS=/data:/data\n" in script


@pytest.mark.parametrize("requested", [[], ["--container-image", "an image", "--container-mounts", "/data:/data"]])
def test_the_step_that_the_script_starts(requested, capsys, tmp_path):
    """With an srun that prints its arguments."""
    _, script, _ = dry_run(capsys, *requested)
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_PER_TASK": "3"}
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", **job}
    done = subprocess.run(["bash"], input=script, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *arguments = done.stdout.splitlines()
    assert first == "job 7 on n1, restart 0"
    container = [f"{name}={value}" for name, value in zip(requested[::2], requested[1::2])]
    assert arguments[: arguments.index("bash")] == [
        "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpus-per-task=3", *container,
    ]  # fmt: skip
    assert arguments[-len(TRAINING) - 2 :] == [*TRAINING, "--nproc-per-node", "8"]


@pytest.mark.parametrize(
    ("flags", "training", "message"),
    [
        (["--nodes", "0"], TRAINING, "got --nodes 0, need at least 1"),
        (["--gpus-per-node", "-1"], TRAINING, "got --gpus-per-node -1, need at least 0"),
        (["--signal-minutes", "0"], TRAINING, "got --signal-minutes 0, need at least 1"),
        (["--signal-minutes", "60", "--time", "1:00:00"], TRAINING, "with --time 1:00:00, need at most 59"),
        (["--signal-minutes", "2000", "--time", "9-0"], TRAINING, "need at most 1092"),
        (["--time", "soon"], TRAINING, "got --time 'soon', need MINUTES"),
        (["--qos", "a\nb"], TRAINING, "got --qos 'a\\nb', need one line without"),
        (["--partition", 'a"b'], TRAINING, "got --partition 'a\"b'"),
        (["--container-mounts", "/a"], TRAINING, "got --container-mounts /a without --container-image"),
        (["--trian-iters", "3"], TRAINING, "unknown flag --trian-iters; did you mean --train-iters?"),
        ([], [*TRAINING, "--nnodes", "2"], "got --nnodes 2 where Slurm runs this on 1 nodes"),
        (["--nodes", "3"], [*TRAINING, "--tensor-model-parallel-size", "16"], "24"),
        ([], TRAINING[:2], "no --save, without which a requeued job would begin again"),
        ([], TRAINING[2:], "no prompts; name --train-files"),
    ],
)
def test_what_cannot_run_is_not_submitted(flags, training, message, capsys):
    code, script, printed = dry_run(capsys, *flags, training=training)
    assert (code, script) == (1, "") and message in printed and "Traceback" not in printed


def test_no_slurm_here(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert submit_slurm.main(TRAINING) == 1
    assert "no sbatch on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("2-3", 183600), ("2-3:30", 185400), ("2-3:30:05", 185405)],
)
def test_times(time, seconds):
    assert submit_slurm.seconds(time) == seconds


def test_its_flags_are_no_training_flags():
    own = {flag for action in submit_slurm.make_parser()._actions for flag in action.option_strings}
    assert not own & {flag for setting in SETTINGS.values() for flag in setting.flags}


def test_it_runs_without_torch():
    code = f"import sys, submit_slurm; submit_slurm.main({['--dry-run', *TRAINING]}); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(submit_slurm.__file__).parent, capture_output=True)
    assert done.returncode == 0


def test_a_name_that_resolves_or_that_nobody_knows_stays(monkeypatch):
    assert address_of("localhost") == "localhost"
    monkeypatch.setenv("PATH", "")
    assert address_of("no-such-host.invalid") == "no-such-host.invalid"
