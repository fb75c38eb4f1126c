"""A Slurm of its own for tests: a controller and virtual nodes n0, n1, ... on this host, in a folder, on free ports."""
from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
START_S = 30.0
# Plain process groups, no cgroups and no accounting: what a container without an init system can do.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
KillWait=5
MailProg=/bin/true
SlurmdParameters=config_overrides
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{last_port}] CPUs=2 RealMemory=8000
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def missing() -> str | None:
    """Why no cluster can be started here."""
    if os.geteuid() != 0:
        return "needs root: slurmd starts jobs as their users"
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"no {', '.join(absent)} on this machine (Debian: apt-get install slurm-wlm munge)" if absent else None


class Cluster:
    """Running between __enter__ and __exit__."""

    def __init__(self, num_nodes: int = 2):
        self.num_nodes, self.processes = num_nodes, []

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            # Not pytest's folder: a socket's path must be shorter than 108 bytes.
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
            self.folder.chmod(0o755)
            stack.callback(self._stop)
            path = os.environ["PATH"] + ":/usr/sbin"
            self.environ = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}
            self._configure()
            self._start("munged", *(f"--{name}={self.folder / file}" for name, file in (
                ("key-file", "munge.key"), ("socket", "munge.sock"), ("pid-file", "munged.pid"),
                ("log-file", "munged.log"), ("seed-file", "munge.seed"),
            )), "--foreground", "--force")  # fmt: skip
            self._wait(lambda: (self.folder / "munge.sock").exists(), "munged")
            self._start("slurmctld", "-D", "-c")
            for node in range(self.num_nodes):
                self._start("slurmd", "-D", "-c", "-N", f"n{node}")
            idle = ["idle"] * self.num_nodes
            self._wait(lambda: self.ask("sinfo", "-h", "-N", "-o", "%T").split() == idle, "the nodes")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        self._stack.close()

    def ask(self, *command: str, **options) -> str:
        """What a Slurm command prints; empty where it fails."""
        return self.call(*command, **options).stdout

    def call(self, *command, **options) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(part) for part in command],
            **{"env": self.environ, "capture_output": True, "text": True, "timeout": 60} | options,
        )

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def _configure(self) -> None:
        (self.folder / "state").mkdir()
        for node in range(self.num_nodes):
            (self.folder / f"spool.n{node}").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        ports = _ports_in_a_row(1 + self.num_nodes)
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0], folder=self.folder, ports=ports,
            last=self.num_nodes - 1, last_port=ports[-1],
        ))  # fmt: skip

    def _start(self, *command: str) -> None:
        with open(self.folder / f"{len(self.processes)}-{command[0]}.log", "w") as log:
            self.processes.append(
                subprocess.Popen(command, env=self.environ, stdout=log, stderr=log, start_new_session=True)
            )

    def _wait(self, ready, what: str) -> None:
        deadline = time.monotonic() + START_S
        while not ready():
            if time.monotonic() > deadline or any(process.poll() is not None for process in self.processes):
                raise RuntimeError(f"{what} did not start\n{self.logs()}")
            time.sleep(0.1)

    def _stop(self) -> None:
        if len(self.processes) > 2:
            # A job's own daemon would outlive slurmd.
            self.ask("scancel", "--me")
            deadline = time.monotonic() + 10
            while self.ask("squeue", "-h") and time.monotonic() < deadline:
                time.sleep(0.1)
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ports_in_a_row(count: int) -> list[int]:
    """Free at this moment, and below the range that the system hands out by itself."""
    for first in range(17000 + os.getpid() % 1000 * 3, 32000 - count, count):
        ports, probes = list(range(first, first + count)), []
        try:
            for port in ports:
                probes.append(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
        return ports
    raise RuntimeError("no free ports")
