"""What a call tells of its progress, and what a step logs, when ranks share the work."""
import pytest

from megatron_longstraw import train
from megatron_longstraw.gradients import Work, accumulate_gradients, advantages_of
from megatron_longstraw.mcore.packing import batch_prompts
from megatron_longstraw.objectives.policy_loss import PolicyObjective
from tests.helpers import random_groups, tiny_policy

from .launch import run_ranks

CHUNKS = 4
LAYOUTS = {
    "cp2": (2, dict(context_parallel_size=2)),
    "pp2": (2, dict(pipeline_model_parallel_size=2)),
    "pp2 vpp2": (2, dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)),
    "tp2 sp": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
}


class Heard:
    def __init__(self):
        self.events = []

    def progress(self, phase, done, total):
        self.events.append((phase, done, total))

    def end(self, phase):
        self.events.append((phase, None, None))


def gradient(rank: int, options: dict) -> dict:
    """By phase: (done, total) in the order told. And largest values over the ranks."""
    policy = tiny_policy(num_layers=4, branches_per_microbatch=1, **options)
    policy.meter.watcher = heard = Heard()
    (batch,) = batch_prompts(random_groups(1, 32 * CHUNKS + 1, [3, 5, 4, 6]), 1)
    accumulate_gradients(policy, [Work(batch, advantages_of(batch, policy.config.algorithm))], PolicyObjective())
    told = {}
    for phase, done, total in heard.events:
        if done is not None:
            told.setdefault(phase, []).append((done, total))
    return {"told": told, "largest": train.largest(policy, [policy.meter.peaks["prefix/state_bytes"], rank])}


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_tells_the_same_chunks(layout):
    world_size, options = LAYOUTS[layout]
    ranks = run_ranks(gradient, world_size, options)
    for rank in ranks:
        for phase in ("capture", "replay", "prefix_backward"):
            told = rank["told"][phase]
            assert [done.parts for done, _ in told] == list(range(CHUNKS)), phase
            assert {total.parts for _, total in told} == {CHUNKS}
        done, total = rank["told"]["capture"][-1]
        assert (done.tokens, total.tokens) == (32 * (CHUNKS - 1), 32 * CHUNKS)
        assert rank["largest"][0] == ranks[0]["largest"][0] > 0 and rank["largest"][1] == world_size - 1
