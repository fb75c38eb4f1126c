"""Jobs on a real Slurm of two virtual nodes: stopped ahead of the time limit, requeued, resumed, and failing."""
from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from megatron_longstraw.slurm import address_of
from tests import slurm_cluster
from tests.checkouts import environment, make_checkout
from tests.helpers import TINY

pytestmark = pytest.mark.dist
RANKS = 4
SCRIPT = "launch/slurm/pretrain_rl_longctx.sbatch"
TASK = '''
import os, signal, time
from pathlib import Path

import numpy as np

HELD_STEP = 1


class Task:
    def prompts(self, step, num_prompts):
        from megatron_longstraw.types import PromptGroup

        if step == HELD_STEP and "HOLD" in os.environ:
            wait_for_the_signal(Path(os.environ["HOLD"]), os.environ["RANK"])
        rng = np.random.default_rng(step)
        return [PromptGroup(rng.integers(0, 60, 24 + 4 * number), [], group_id=number) for number in range(num_prompts)]

    def render(self, token_ids):
        return "".join(chr(97 + token % 26) for token in token_ids)


def wait_for_the_signal(folder, rank):
    """In the first stay on the nodes; notes that it came, beside what the run does on it."""
    if (folder / f"asked-{rank}").exists():
        return
    before, received = signal.getsignal(signal.SIGUSR1), []
    signal.signal(signal.SIGUSR1, lambda number, frame: (received.append(number), before(number, frame)))
    (folder / f"holding-{rank}").touch()
    deadline = time.monotonic() + 60
    while not received:
        assert time.monotonic() < deadline, "no signal"
        time.sleep(0.02)
    (folder / f"asked-{rank}").touch()
    if "STUCK" in os.environ:
        time.sleep(600)


def task(config):
    return Task()


def score(data_source, solution_str, ground_truth, extra_info):
    return solution_str.count("a") + 0.1 * solution_str.count("b")
'''
OPTIONS = TINY | {"train_iters": 3, "prompt_function": "slurm_task:task", "reward_function": "slurm_task:score"}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()] + ["--run-dir", "run"]
FAILS_WHEN_ASKED = """
exec python3 -c '
import os, pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *args: sys.exit("failing"))
pathlib.Path("holding-" + os.environ["SLURM_NODEID"]).touch()
time.sleep(300)'
"""
"""In the place of the launch script."""


@pytest.fixture(scope="module")
def cluster():
    if reason := slurm_cluster.missing():
        assert os.environ.get("CI") != "true", reason
        pytest.skip(reason)
    with slurm_cluster.Cluster() as cluster:
        ours = {name: cluster.environ[name] for name in ("SLURM_CONF", "PATH")}
        cluster.environ = environment(GLOO_SOCKET_IFNAME="lo", **ours)
        yield cluster


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return make_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "slurm_task.py").write_text(TASK)
    return tmp_path


class Job:
    def __init__(self, cluster, folder: Path, command: list, **variables):
        self.cluster, self.folder = cluster, folder
        env = cluster.environ | {name: str(value) for name, value in variables.items()}
        done = cluster.call(*command, cwd=folder, env=env)
        assert done.returncode == 0, done.stderr
        self.number = re.search(r"(\d+)\s*$", done.stdout)[1]

    def shown(self) -> dict[str, str]:
        line = self.cluster.ask("scontrol", "--oneliner", "show", "job", self.number)
        return dict(re.findall(r"(\w+)=(\S+)", line))

    def output(self) -> str:
        path = self.folder / "job.out"
        return path.read_text() if path.exists() else ""

    def wait_until(self, done, timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline, f"{self.shown()}\n{self.output()[-6000:]}\n{self.cluster.logs()}"
            time.sleep(0.2)

    def state(self) -> tuple[str, int]:
        """Where it is when it has ended, and how often it has been requeued."""
        self.wait_until(lambda: self._at_the_end(self.shown()))
        shown = self.shown()
        return shown["JobState"], int(shown["Restarts"])

    def _at_the_end(self, shown: dict[str, str]) -> bool:
        if shown["JobState"] == "PENDING" and shown["Restarts"] != "0":
            # Slurm lets a requeued job wait for two minutes.
            self.cluster.call("scontrol", "update", f"JobId={self.number}", "StartTime=now")
        return shown["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def ask_to_stop(self, when_holding: int) -> None:
        """What Slurm does ahead of the time limit, once so many processes are in the midst of a run."""
        self.wait_until(lambda: self._num_holding() == when_holding or self._at_the_end(self.shown()))
        self.cluster.call("scancel", "--batch", "--signal=USR1", self.number)

    def _num_holding(self) -> int:
        return len(list(self.folder.glob("holding-*")))

    def metrics(self) -> list[dict]:
        """Of each step, but for what differs from run to run."""
        lines = [json.loads(line) for line in (self.folder / "run/metrics.jsonl").read_text().splitlines()]
        return [{name: line[name] for name in line if not name.startswith(("timing", "perf"))} for line in lines]


def submit(cluster, checkout, folder, **variables) -> Job:
    """By the tool."""
    own = ["--nodes", "2", "--gpus-per-node", "0", "--time", "20", "--signal-minutes", "2", "--output", "job.out"]
    command = [checkout / ".venv/bin/python", checkout / "tools/submit_slurm.py", *own, "--", *FLAGS, "--save", "save", "--save-interval", "1"]
    return Job(cluster, folder, command, **variables)


def test_a_name_that_does_not_resolve_has_an_address_in_slurm(cluster, monkeypatch):
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environ[name])
    assert address_of("n0") == "127.0.0.1"
    assert address_of("n7") == "n7"


def test_a_job_goes_on_after_its_time_limit(cluster, checkout, folder):
    straight_folder = folder / "straight"
    straight_folder.mkdir()
    (straight_folder / "slurm_task.py").write_text(TASK)
    sbatch = ["sbatch", "--nodes=2", "--gpus-per-node=0", "--time=20", "--signal=B:USR1@60", "--output=job.out"]
    straight = Job(
        cluster, straight_folder, [*sbatch, checkout / SCRIPT, *FLAGS, "--save", "save"], LONGSTRAW_ROOT=checkout
    )
    assert straight.state() == ("COMPLETED", 0), straight.output()
    assert "cp4 on cpu" in straight.output() and len(straight.metrics()) == OPTIONS["train_iters"]

    job = submit(cluster, checkout, folder, HOLD=folder)
    job.ask_to_stop(when_holding=RANKS)
    assert job.state() == ("COMPLETED", 1), job.output()
    assert len(list(folder.glob("asked-*"))) == RANKS
    assert job.metrics() == straight.metrics()
    for line in (rf"job {job.number} on n\[0-1\], restart 0", "stopped: asked to stop", "back into the queue",
                 rf"job {job.number} on n\[0-1\], restart 1", "goes on after step 1"):  # fmt: skip
        assert len(re.findall(line, job.output())) == 1, f"{line} not once in\n{job.output()}"


def test_a_call_that_does_not_end_is_abandoned(cluster, checkout, folder):
    """The job goes on from its last checkpoint as if nothing had been."""
    job = submit(cluster, checkout, folder, HOLD=folder, STUCK=1, LONGSTRAW_STOP_PATIENCE_S=3)
    job.ask_to_stop(when_holding=RANKS)
    assert job.state() == ("COMPLETED", 1), job.output()
    for line in ("was abandoned", "back into the queue", "restart 1", "goes on after step 1"):
        assert len(re.findall(line, job.output())) == 1, f"{line} not once in\n{job.output()}"
    assert [line["training/global_step"] for line in job.metrics()] == list(range(OPTIONS["train_iters"]))


def test_a_job_that_fails_is_not_requeued(cluster, checkout, folder):
    script = folder / "launch/pretrain_rl_longctx.sh"
    script.parent.mkdir()
    script.write_text(FAILS_WHEN_ASKED)
    command = ["sbatch", "--nodes=2", "--gpus-per-node=0", "--time=20", "--output=job.out", checkout / SCRIPT]
    job = Job(cluster, folder, command)
    job.ask_to_stop(when_holding=2)
    assert job.state() == ("FAILED", 0), job.output()
    assert "asked to stop" in job.output() and "failing" in job.output()
    assert "back into the queue" not in job.output()


def test_a_refusal_of_sbatch_is_one_line(cluster, checkout, folder):
    command = [checkout / ".venv/bin/python", checkout / "tools/submit_slurm.py"]  # with GPUs
    done = cluster.call(*command, "--", *FLAGS, "--save", "save", cwd=folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("SubmitError: sbatch refuses: ") and "Invalid generic resource" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_away_from_the_repository_it_says_what_to_do(cluster, checkout, folder):
    job = Job(cluster, folder, ["sbatch", "--gpus-per-node=0", "--time=20", "--output=job.out", checkout / SCRIPT])
    assert job.state() == ("FAILED", 0)
    assert "submit from the repository root" in job.output()
