"""Node lists, and where the ranks of a Slurm job meet."""
import pytest

from megatron_longstraw.slurm import SlurmError, check_one_task_per_node, parse_nodelist, rendezvous

JOB = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "n[03-05]",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "login",
}
STEP = {"SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "n[03-05]"}
NO_LISTS = ("", ",", "n1,", "n1,,n2", "n1 n2", "n[1-", "n1]", "n[]", "n[a-b]", "n[3-1]", "n[1--2]", "n[1-2-3]")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[03-05]", ["n03", "n04", "n05"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[9-10]", ["n9", "n10"]),
        ("gpu-a[1,3-4]-ib,login", ["gpu-a1-ib", "gpu-a3-ib", "gpu-a4-ib", "login"]),
        ("rack[1-2]n[07-08]", ["rack1n07", "rack1n08", "rack2n07", "rack2n08"]),
        ("localhost,localhost", ["localhost", "localhost"]),
    ],
)
def test_nodelist(text, names):
    assert parse_nodelist(text) == names


@pytest.mark.parametrize("text", NO_LISTS)
def test_what_slurm_never_writes_is_refused(text):
    with pytest.raises(SlurmError, match="got node list"):
        parse_nodelist(text)


@pytest.mark.parametrize("node", range(3))
def test_every_node_finds_the_first_of_the_list(node, monkeypatch):
    """K02: the list decides, not the machine that called srun, and without scontrol."""
    monkeypatch.setenv("PATH", "")
    meeting = rendezvous(JOB | {"SLURM_NODEID": str(node)})
    assert (meeting.num_nodes, meeting.node_rank, meeting.master_addr, meeting.master_port) == (3, node, "n03", "23456")


def test_a_step_of_its_own_meets_on_its_own_nodes():
    step = JOB | {"SLURM_STEP_NODELIST": "n[04-05]", "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "3"}
    meeting = rendezvous(step, num_nodes=2)
    assert meeting.torchrun_flags() == ["--nnodes=2", "--node-rank=1", "--master-addr=n04", "--master-port=23456"]


@pytest.mark.parametrize(
    ("flag", "variable", "port"),
    [
        (29500, "29600", "29500"),
        ("29500", "29600", "29500"),
        (None, "29600", "29600"),
        (None, "", "23456"),
        (None, None, "23456"),
    ],
)
def test_port_by_flag_then_environment_then_job(flag, variable, port):
    """K04: and always a text, because os.environ takes nothing else."""
    environ = JOB if variable is None else JOB | {"MASTER_PORT": variable}
    assert rendezvous(environ, master_port=flag).master_port == port


@pytest.mark.parametrize(
    ("flag", "variable", "source"),
    [("x", "29600", "--master-port"), (0, "1", "--master-port"), (None, "70000", "MASTER_PORT")],
)
def test_what_is_no_port_is_refused(flag, variable, source):
    with pytest.raises(SlurmError, match=f"got {source} .*, need a port number"):
        rendezvous(JOB | {"MASTER_PORT": variable}, master_port=flag)


def test_address_by_flag_then_environment():
    assert rendezvous(JOB | {"MASTER_ADDR": "other"}).master_addr == "other"
    assert rendezvous(JOB | {"MASTER_ADDR": "other"}, master_addr="given").master_addr == "given"


def test_other_nodes_than_the_allocation_are_an_error():
    """K06"""
    with pytest.raises(SlurmError, match="got --nnodes 1 where Slurm runs this on 3 nodes"):
        rendezvous(JOB, num_nodes=1)
    with pytest.raises(SlurmError, match="got --nnodes 1 where"):
        rendezvous({"SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}, num_nodes=1)
    with pytest.raises(SlurmError, match="this step runs on 2 of the job's 3 nodes and the others would idle"):
        rendezvous(JOB | {"SLURM_STEP_NODELIST": "n[04-05]"})


def test_one_task_a_node():
    check_one_task_per_node(JOB | STEP)
    check_one_task_per_node({"SLURM_NODEID": "0", "SLURM_NNODES": "1"})
    for environ, message in (
        (JOB, "holds 3 nodes and this runs on one of them only"),
        (JOB | STEP | {"SLURM_STEP_NUM_TASKS": "24"}, "got 24 tasks on 3 nodes"),
        ({"SLURM_JOB_ID": "1", "SLURM_NNODES": "1"}, "does not run on its nodes"),
    ):
        with pytest.raises(SlurmError, match=f"{message}.*srun --ntasks-per-node=1"):
            check_one_task_per_node(environ)
