"""launch/pretrain_rl_longctx.sh as people start it: by torchrun, by bash, and in a Slurm job."""
from __future__ import annotations

import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_longstraw.config import load_config
from megatron_longstraw.slurm import PORTS
from tests.checkouts import environment, make_checkout

ROOT = Path(__file__).parents[2]
NAME = "launch/pretrain_rl_longctx.sh"
QUICKSTART = ROOT / "examples/needle/quickstart.toml"
TINY = {"train_iters": 1, "max_prompt_length": 48, "lr_warmup_iters": 0, "train_batch_size": 2, "run_dir": "run"}
TINY_FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
OWN_RUN = """
[model]
vocab_size = 64
[rollout]
max_prompt_length = 32
max_response_length = 2
[reward]
reward_function = "own_task:score"
[run]
prompt_function = "examples.needle.task:task"
run_dir = "run"
"""
OWN_TASK = "from examples.needle.task import score\n"


def start(command: list, folder: Path, **variables) -> subprocess.Popen:
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, timeout_s: float = 240) -> tuple[int, str, str]:
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, stdout, stderr


def torchrun(*flags) -> list:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", ROOT / NAME, *flags]


def free_port(wanted: int = 0) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", wanted))
        return probe.getsockname()[1]


def job_with_a_free_port() -> int:
    while True:
        job = random.randrange(len(PORTS))
        try:
            free_port(PORTS[job])
        except OSError:
            continue
        return job


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return make_checkout(tmp_path_factory.mktemp("a checkout"))


@pytest.fixture
def own_run(tmp_path):
    """A user's folder with a configuration and a reward function."""
    (tmp_path / "own.toml").write_text(OWN_RUN)
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    return tmp_path


def trained(folder: Path) -> bool:
    return len((folder / "run/metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.dist
def test_torchrun_without_flags_trains_the_quickstart(tmp_path):
    code, stdout, stderr = finish(start(torchrun(*TINY_FLAGS, "--warmup-curriculum", "16:1:2"), tmp_path))
    assert code == 0, stderr[-4000:]
    assert stdout.startswith("layout     cp2 on ") and "\nwarm-up " in stdout
    assert load_config([tmp_path / "run/config.toml"]) == load_config([QUICKSTART], TINY).resolve()


@pytest.mark.dist
def test_bash_trains_a_configuration_with_every_rank_in_context_parallel(checkout, own_run):
    # Another checkout in the user's folder must not be taken for this one.
    (own_run / "megatron_longstraw").mkdir()
    (own_run / "megatron_longstraw/__init__.py").write_text("raise ImportError('another checkout')")
    process = start(["bash", checkout / NAME, "--config", "own.toml"], own_run, MASTER_PORT=free_port())
    code, stdout, stderr = finish(process)
    assert code == 0, stderr[-4000:]
    assert "no GPU found: 2 ranks on the CPU\nlayout     cp2 on cpu" in stdout or torch.cuda.is_available()
    assert "warm-up" not in stdout and trained(own_run)
    assert "Warning" not in stderr, stderr[-4000:]


@pytest.mark.dist
def test_slurm_joins_one_task_of_each_node(checkout, own_run):
    common = dict(
        SLURM_JOB_ID=job_with_a_free_port(),
        SLURM_JOB_NODELIST="localhost,localhost",
        SLURM_NNODES=2,
        SLURM_STEP_ID=0,
        SLURM_STEP_NUM_NODES=2,
        SLURM_STEP_NUM_TASKS=2,
        SLURM_LAUNCH_NODE_IPADDR="192.0.2.1",
    )
    command = ["bash", checkout / NAME, "--config", "own.toml", "--nproc-per-node", "1"]
    tasks = [start(command, own_run, SLURM_NODEID=node, **common) for node in range(2)]
    results = [finish(task) for task in tasks]
    assert [code for code, _, _ in results] == [0, 0], "\n".join(stderr[-2000:] for _, _, stderr in results)
    assert "layout     cp2 on " in results[0][1] and "layout" not in results[1][1]
    assert trained(own_run)


@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        ("bash", 2),
        ("bash, environment", 8),
        ("quickstart.sh", 4),
        ("slurm", 16),
        pytest.param("torchrun", 2, marks=pytest.mark.dist),
    ],
)
def test_dry_run_prints_the_plan_once_and_leaves_nothing(way, ranks, checkout, tmp_path):
    flags, variables = ["--dry-run"], {}
    if way == "bash":
        flags += ["--nproc-per-node", "2"]
    elif way == "bash, environment":
        flags, variables = ["--nproc-per-node", "8"], {"DRY_RUN": "1"}
    elif way == "quickstart.sh":
        flags += ["--nproc-per-node", "4"]
    elif way == "slurm":
        flags += ["--nproc-per-node", "8"]
        variables = dict(SLURM_JOB_ID=7, SLURM_JOB_NODELIST="n[1-2]", SLURM_NNODES=2)
    script = checkout / ("launch/quickstart.sh" if way == "quickstart.sh" else NAME)
    command = torchrun(*flags) if way == "torchrun" else ["bash", script, *flags]
    code, stdout, stderr = finish(start(command, tmp_path, **variables))
    assert code == 0, stderr
    assert stdout.count(f"layout     cp{ranks} on {ranks} ranks") == 1
    for word in ("padded 64", "most at once", "10 minutes in every group", "tokens"):
        assert stdout.count(word) == 1, word
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trian-iters", "3"], "unknown flag --trian-iters; did you mean --train-iters?"),
        (["--pipeline-model-parallel-size", "2", "--num-layers", "3"], "num_layers 3 over pipeline_model_parallel_"),
        (["--config", "none.toml"], "none.toml: cannot be read"),
        (["--hf-checkpoint", "no_folder"], "no_folder"),
    ],
)
def test_bash_ends_with_one_message_before_any_rank_starts(flags, message, checkout, tmp_path):
    code, stdout, stderr = finish(start(["bash", checkout / NAME, "--nproc-per-node", "2", *flags], tmp_path))
    assert code == 1
    assert stderr.count(message) == 1 and "Traceback" not in stderr, stderr
    assert len(stderr.splitlines()) <= 3 and not list(tmp_path.iterdir())


@pytest.mark.dist
def test_torchrun_shows_a_wrong_flag_once(tmp_path):
    code, stdout, stderr = finish(start(torchrun("--trian-iters", "3"), tmp_path))
    assert code != 0 and stdout == ""
    message = "ConfigError: the configuration has 1 problem:\n  - unknown flag --trian-iters; did you mean --train-iters?\n"
    said, _, summary = stderr.partition("FAILED\n")
    assert stderr.startswith(message) and said.count("unknown flag") == 1, stderr
    assert "traceback : ConfigError: the configuration has 1 problem:" in summary and summary.count("unknown flag") == 1
    assert "To enable traceback" not in stderr
