"""Where the ranks of a Slurm job meet, from the environment that Slurm gives each task. Standard library only.

    nodes = parse_nodelist("gpu[03-05]")            # no scontrol needed
    meeting = rendezvous(os.environ)                # the same on every node but for node_rank
    torchrun ... *meeting.torchrun_flags()

A step (what one srun started) may cover fewer nodes than its job; its ranks meet on the step's first node.
SLURM_LAUNCH_NODE_IPADDR is never read: it names the machine that called srun, which need not be in the job.
"""
from __future__ import annotations

import itertools
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from typing import Mapping

PORTS = range(20000, 30000)
"""Below the range that Linux hands out by itself (32768 and up)."""
REQUEUED = "LONGSTRAW_REQUEUED"
"""Set where the job goes back into the queue when its time is up."""
_NODES = r"(?:[^\[\],\s]|\[[\d,-]+\])+"
"""A name in which [3-5,9] stands for several numbers."""


class SlurmError(ValueError):
    """The job does not fit what was asked for; the message says what to change."""


@dataclass(frozen=True)
class Rendezvous:
    """One node's part in the meeting of all."""

    num_nodes: int
    node_rank: int
    master_addr: str
    master_port: str

    def torchrun_flags(self) -> list[str]:
        return [
            f"--nnodes={self.num_nodes}",
            f"--node-rank={self.node_rank}",
            f"--master-addr={self.master_addr}",
            f"--master-port={self.master_port}",
        ]


def in_job(environ: Mapping[str, str]) -> bool:
    return "SLURM_JOB_ID" in environ


def rendezvous(
    environ: Mapping[str, str],
    *,
    num_nodes: int | None = None,
    master_addr: str | None = None,
    master_port: int | str | None = None,
) -> Rendezvous:
    """Of this node's task. What is passed wins over MASTER_ADDR and MASTER_PORT, these over what follows from the job:
    the first node of the step (see `address_of`), and a port by the job's number.

    Raises:
        SlurmError: the job holds another number of nodes, or a variable is not what Slurm writes.
    """
    nodes = parse_nodelist(environ.get("SLURM_STEP_NODELIST") or _variable(environ, "SLURM_JOB_NODELIST"))
    _check_nodes(environ, len(nodes), num_nodes)
    return Rendezvous(
        num_nodes=len(nodes),
        node_rank=int(environ.get("SLURM_NODEID", "0")),
        master_addr=master_addr or environ.get("MASTER_ADDR") or address_of(nodes[0]),
        master_port=choose_port(environ, master_port, default=_port_of_job(environ)),
    )


def address_of(node: str) -> str:
    """The name itself where it resolves, else what Slurm's configuration has as the node's address; where Slurm cannot
    be asked, the name."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        scontrol = shutil.which("scontrol")
    if scontrol is None:
        return node
    shown = subprocess.run([scontrol, "--oneliner", "show", "node", node], capture_output=True, text=True)
    address = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
    return address[1] if address else node


def check_one_task_per_node(environ: Mapping[str, str]) -> None:
    """Raises:
    SlurmError: this is not the only task of its node, or none at all, or nobody started tasks on the other nodes.
    """
    how = "srun --ntasks-per-node=1 bash launch/pretrain_rl_longctx.sh"
    if "SLURM_NODEID" not in environ:
        raise SlurmError(f"this shell belongs to a job but does not run on its nodes; need {how}")
    num_nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "1"))
    if "SLURM_STEP_NUM_TASKS" not in environ and num_nodes > 1:
        raise SlurmError(f"the job holds {num_nodes} nodes and this runs on one of them only; need {how}")
    num_tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if num_tasks != num_nodes:
        raise SlurmError(f"got {num_tasks} tasks on {num_nodes} nodes; need one a node, which starts its ranks: {how}")


def parse_nodelist(text: str) -> list[str]:
    """Node names of Slurm's short form: "n[03-05,9],login" -> n03, n04, n05, n9, login.

    Raises:
        SlurmError: the text is not such a list.
    """
    if not re.fullmatch(rf"{_NODES}(,{_NODES})*", text):
        raise SlurmError(f"got node list {text!r}, need names like n1,n2 or n[1-4,7]")
    names = []
    for item in re.findall(_NODES, text):
        parts = re.split(r"\[([^\]]*)\]", item)  # names and bracketed ranges in turn
        choices = [_numbers(part, text) if index % 2 else [part] for index, part in enumerate(parts)]
        names += ["".join(choice) for choice in itertools.product(*choices)]
    return names


def _numbers(ranges: str, text: str) -> list[str]:
    """ "03-05,9" -> 03, 04, 05, 9 """
    numbers = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise SlurmError(f"got node list {text!r}, whose [{ranges}] is no list of rising ranges")
        width = len(match[1])
        numbers += [f"{number:0{width}}" for number in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return numbers


def _check_nodes(environ: Mapping[str, str], found: int, wanted: int | None) -> None:
    of_job = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or found)
    if wanted is not None and wanted != found:
        raise SlurmError(
            f"got --nnodes {wanted} where Slurm runs this on {found} nodes; leave --nnodes out, or change sbatch's or "
            f"srun's --nodes"
        )
    if wanted is None and found != of_job:
        raise SlurmError(
            f"this step runs on {found} of the job's {of_job} nodes and the others would idle; change srun's --nodes "
            f"to {of_job}, or say --nnodes {found} if that is meant"
        )


def choose_port(environ: Mapping[str, str], given: int | str | None, default: str) -> str:
    """`given`, else MASTER_PORT, else the default; a text, as the environment wants it.

    Raises:
        SlurmError: the one that counts is no port.
    """
    source, text = "MASTER_PORT", environ.get("MASTER_PORT") or default
    if given is not None:
        source, text = "--master-port", str(given)
    if text != default and not (text.isdecimal() and 0 < int(text) < 65536):
        raise SlurmError(f"got {source} {text!r}, need a port number from 1 to 65535")
    return text


def _port_of_job(environ: Mapping[str, str]) -> str:
    return str(PORTS[int(_variable(environ, "SLURM_JOB_ID")) % len(PORTS)])


def _variable(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise SlurmError(f"{name} is not set; need the environment of a Slurm job")
    return environ[name]
