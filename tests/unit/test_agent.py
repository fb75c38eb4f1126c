"""What reaches the ranks of a torchrun: USR1, whether they listen yet or not, and its end; and what is said of theirs."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_longstraw.agent import deaths

ROOT = Path(__file__).parents[2]
RANK = """
import os, signal, sys, time
from pathlib import Path
from megatron_longstraw.interruption import StopRequest

def wait_until(done):
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
(folder / f"started-{rank}").touch()
wait_until(lambda: signal.SIGUSR1 in signal.sigpending())
stop = StopRequest()
stop.listen()
assert stop.received == "SIGUSR1"
stop.received = None
(folder / f"listening-{rank}").touch()
wait_until(lambda: stop.received)
(folder / f"stopped-{rank}").touch()
"""


ORPHAN = """
import os, sys, time
from pathlib import Path
from megatron_longstraw.interruption import end_with_torchrun

end_with_torchrun()
unfinished = Path(sys.argv[1]) / f"unfinished-{os.environ['RANK']}"
unfinished.write_text(str(os.getpid()))
unfinished.rename(unfinished.with_name(unfinished.name.replace("unfinished", "pid")))
time.sleep(60)
"""


FAILS = """
import os, signal, sys
from megatron_longstraw.user_errors import report

if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
report(ValueError("the reason"))
sys.exit(1)
"""


@pytest.mark.dist
@pytest.mark.parametrize("why", ["said", "killed"])
def test_what_a_rank_has_said_is_not_followed_by_more(why, tmp_path):
    """Of a rank that could say nothing, torchrun tells what became of it."""
    (tmp_path / "rank.py").write_text(FAILS)
    command = [sys.executable, "-m", "megatron_longstraw.agent", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, tmp_path / "rank.py", why], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("the reason") == (why == "said") and ("Traceback" in done.stderr) == (why == "killed"), done.stderr
    assert ("Signal 9 (SIGKILL) received" in done.stderr) == (why == "killed")


def wait_until(done):
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent death signal is Linux's")
def test_ranks_end_with_a_torchrun_that_is_killed(tmp_path):
    (tmp_path / "rank.py").write_text(ORPHAN)
    torchrun = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "rank.py", tmp_path],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    finally:
        torchrun.kill()
        torchrun.wait()
    for path in tmp_path.glob("pid-*"):
        wait_until(lambda: not Path(f"/proc/{path.read_text()}").exists())


@pytest.mark.dist
def test_usr1_reaches_every_rank_and_ends_none(tmp_path):
    """Once before the ranks listen, and once more, as schedulers that signal every process do."""
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "megatron_longstraw.agent", "--standalone", "--nproc-per-node", "2"]
    agent = subprocess.Popen(
        # A shell that ignores the signal, as the batch script's does.
        ["bash", "-c", 'trap "" USR1; exec "$@"', "-", *command, tmp_path / "rank.py", tmp_path],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        for name in ("started", "listening"):
            wait_until(lambda: len(list(tmp_path.glob(f"{name}-*"))) == 2 or agent.poll() is not None)
            agent.send_signal(signal.SIGUSR1)
        assert agent.wait(timeout=60) == 0, agent.stderr.read()[-3000:]
    finally:
        agent.kill()
    assert len(list(tmp_path.glob("stopped-*"))) == 2


def test_a_death_is_told_with_rank_and_signal():
    """Of those nobody has waited for; a rank that ended by itself has had its say."""
    processes = [subprocess.Popen([sys.executable, "-c", body]) for body in ("import time; time.sleep(60)",) * 2 + ("",)]
    ranks = {process.pid: rank for rank, process in enumerate(processes, start=5)}
    assert deaths(ranks) == []
    processes[0].kill()
    processes[1].terminate()
    for process in processes:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    killed, ended = deaths(ranks)
    assert killed.startswith(f"rank 5 (process {processes[0].pid}) died of signal 9 (Killed), which the kernel sends")
    assert ended == f"rank 6 (process {processes[1].pid}) died of signal 15 (Terminated)"
    for process in processes:
        process.wait()
    assert deaths(ranks) == []
