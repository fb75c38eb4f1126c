"""What a command line comes to, by the environment it is typed in."""
import subprocess
import sys

import pytest

from megatron_longstraw import user_errors
from megatron_longstraw.config import ConfigError
from megatron_longstraw.launch import start
from megatron_longstraw.slurm import SlurmError

TORCHRUN = [sys.executable, "-m", "megatron_longstraw.agent", "--nproc-per-node=2"]
FLAGS = ["--prompt-function", "mytask:task", "--lr", "1e-3"]
CP2 = ["--context-parallel-size", "2"]
RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}


def begin(*flags, program="mod", **environ):
    return start(program, [*FLAGS, "--nproc-per-node", "2", *flags], environ)


def test_here_it_becomes_torchrun():
    assert begin() == [*TORCHRUN, "--standalone", "-m", "mod", *FLAGS, *CP2]
    assert begin(program="train.py") == [*TORCHRUN, "--standalone", "train.py", *FLAGS, *CP2]


def test_a_rank_becomes_the_program():
    for rank in "01":
        assert start("mod", FLAGS, RANK | {"RANK": rank}) == [sys.executable, "-u", "-m", "mod", *FLAGS, *CP2]


def test_a_port_of_ones_own():
    """K04"""
    here = ["--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1"]
    tail = ["-m", "mod", *FLAGS, *CP2]
    assert begin(MASTER_PORT="29600") == [*TORCHRUN, *here, "--master-port=29600", *tail]
    assert begin("--master-port", "29500", MASTER_PORT="29600") == [*TORCHRUN, *here, "--master-port=29500", *tail]


def test_in_a_slurm_job_the_world_is_all_nodes():
    meeting = ["--nnodes=2", "--node-rank=1", "--master-addr=n1", "--master-port=20007"]
    assert begin(**SLURM) == [*TORCHRUN, *meeting, "-m", "mod", *FLAGS, "--context-parallel-size", "4"]
    with pytest.raises(SlurmError, match="got --nnodes 1 where"):
        begin("--nnodes", "1", **SLURM)
    with pytest.raises(SlurmError, match="got 16 tasks"):
        begin(**SLURM | {"SLURM_STEP_NUM_TASKS": "16"})


@pytest.mark.parametrize(
    "layout",
    [
        ["--tensor-model-parallel-size", "2"],
        ["--context-parallel-size=1"],
        ["--pipeline-model-parallel-size", "1"],
        ["--num-experts", "4", "--expert-model-parallel-size", "2"],
    ],
)
def test_a_given_layout_stays(layout):
    assert begin(*layout)[-len(layout) :] == layout


def test_a_layout_in_a_file_stays(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text("[parallel]\ntensor_model_parallel_size = 2\n")
    assert begin("--config", str(file))[-2:] == ["--config", str(file)]
    file.write_text("[parallel]\nuse_distributed_optimizer = true\n")
    assert begin("--config", str(file))[-2:] == CP2


def test_dry_run_plans_for_the_ranks_that_would_run():
    def layout(*flags, **environ):
        return start("mod", flags, environ).splitlines()[0].split(maxsplit=1)[1]

    assert layout("--dry-run", "--world-size", "8") == "cp8 on 8 ranks"
    assert layout("--dry-run", **RANK) == layout(DRY_RUN="1", **RANK) == "cp2 on 2 ranks"
    assert start("mod", ["--dry-run"], RANK | {"RANK": "1"}) == ""
    assert layout("--dry-run", "--nproc-per-node", "4", **SLURM) == "cp8 on 8 ranks"
    assert isinstance(begin(DRY_RUN="0"), list)


def test_a_dry_run_and_its_errors_need_no_torch():
    code = (
        "import sys\nfrom megatron_longstraw.launch import main\n"
        "assert main(['mod', '--dry-run', '--world-size', '8']) == 0\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (["--context-parallel-size", "3"], {}, "context 3 = 3 for a world of 2 ranks"),
        (["--world-size", "4"], {}, "got --world-size 4 without --dry-run"),
        (["--nnodes", "2"], {}, "got --nnodes 2 outside a Slurm job; start torchrun"),
        (["--nproc-per-node", "0"], {}, "got --nproc-per-node 0, need at least 1"),
        (["--prompt-function", "none"], {}, "no prompts"),
        (["--nproc-per-node", "2"], RANK, "unknown flag --nproc-per-node"),
        (["--no-such-flag"], {}, "unknown flag --no-such-flag"),
    ],
)
def test_what_cannot_run_is_said_before(flags, environ, message):
    with pytest.raises(ConfigError, match=message):
        start("mod", flags if environ else [*FLAGS, "--nproc-per-node", "2", *flags], environ)


def test_rank_0_speaks_first_and_others_only_if_it_does_not(monkeypatch, capsys):
    """torchrun ends every rank soon after the first has failed."""
    waits = []
    monkeypatch.setattr(user_errors.time, "sleep", waits.append)
    user_errors.report(ValueError("the reason"))
    assert (capsys.readouterr().err, waits) == ("ValueError: the reason\n", [])
    monkeypatch.setenv("RANK", "3")
    user_errors.report(ValueError("the reason"))
    assert (capsys.readouterr().err, waits) == ("rank 3: ValueError: the reason\n", [user_errors.PATIENCE_S])


def test_torchrun_is_told_the_message(monkeypatch, tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    user_errors.report(ConfigError(["one", "two"]))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert failure.message["message"] == f"ConfigError: {ConfigError(['one', 'two'])}"


@pytest.mark.parametrize("message, waits", [
    ("[pair.cc:536] Connection closed by peer [127.0.0.1]:36226", True),
    ("[pair.cc:538] Read error [127.0.0.1]:3622: Connection reset by peer", True),
    ("[unbound_buffer.cc:81] Timed out waiting 7000ms for recv operation to complete", False),
    ("shape '[2]' is invalid for input of size 3", False),
])  # fmt: skip
def test_a_rank_that_has_lost_a_peer_leaves_the_word_to_that(message, waits, monkeypatch, capsys):
    from megatron_longstraw.train import exit_status

    slept = []
    monkeypatch.setattr(user_errors.time, "sleep", slept.append)

    def body():
        raise RuntimeError(message)

    if waits:
        assert exit_status(body) == 1 and slept
        assert capsys.readouterr().err.startswith("rank 0: another rank is gone")
    else:
        with pytest.raises(RuntimeError):
            exit_status(body)
        assert not slept


def test_weights_that_sample_no_number_end_in_one_line(capsys):
    from megatron_longstraw.train import exit_status

    def body():
        raise FloatingPointError("the weights are broken, lower --lr")

    assert exit_status(body) == 1 and capsys.readouterr().err == "FloatingPointError: the weights are broken, lower --lr\n"
