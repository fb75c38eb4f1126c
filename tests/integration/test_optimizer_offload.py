"""The optimizer's state in host memory: trained weights, where it is, and what is refused."""
import pytest

from megatron_longstraw.config import ConfigError, check, load_config
from megatron_longstraw.mcore.cpu_runtime import on_host
from megatron_longstraw.planner.bytes import bytes_of_rank
from tests.helpers import TINY, tiny_trainer
from tests.training_runs import score, train

DISTRIBUTED = dict(bf16=True, use_distributed_optimizer=True)


@pytest.mark.parametrize("options", [{}, dict(num_experts=4, moe_ffn_hidden_size=32)], ids=["dense", "experts"])
def test_training_is_the_same(options):
    """To the last bit of every weight: it is the same arithmetic in another place."""
    here = train(0, 4, DISTRIBUTED | options | dict(lr=1e-2), reward=score)
    there = train(0, 4, DISTRIBUTED | options | dict(lr=1e-2, optimizer_cpu_offload=True), reward=score)
    start = train(0, 0, DISTRIBUTED | options, reward=score)
    assert there["weights"] == here["weights"] != start["weights"]
    assert [row["actor/grad_norm"] for row in there["history"]] == [row["actor/grad_norm"] for row in here["history"]]


def test_state_is_on_the_host_and_counted_there():
    """Master weights and averages: nothing of them stays beside the weights. The plan has these bytes."""
    options = DISTRIBUTED | dict(optimizer_cpu_offload=True)
    policy, optimizer = tiny_trainer(**options)
    held = [hybrid.optimizer for hybrid in optimizer._inner()]
    groups = [group for hybrid in held for part in hybrid.sub_optimizers for group in part.param_groups]
    masters = [parameter for group in groups for parameter in group["params"]]
    assert masters and all(on_host(parameter) for parameter in masters)
    assert all(hybrid.gpu_optimizer is None for hybrid in held)
    num_elements = sum(parameter.numel() for chunk in policy.chunks for parameter in chunk.parameters())
    assert sum(parameter.numel() for parameter in masters) == num_elements
    planned = bytes_of_rank(policy.config, 1)
    assert (planned.optimizer, planned.host_optimizer) == (0, 16 * num_elements)


@pytest.mark.parametrize("missing", DISTRIBUTED)
def test_what_megatron_cannot_offload_is_refused(missing):
    with pytest.raises(ConfigError, match="--optimizer-cpu-offload or --bf16 or --use-distributed-optimizer"):
        check(load_config(overrides=TINY | DISTRIBUTED | {missing: False, "optimizer_cpu_offload": True}))
