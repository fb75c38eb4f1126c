"""A run that stops and goes on is the run that never stopped."""
import random

import numpy as np
import pytest
import torch

from megatron_longstraw.algorithm import RLStep
from megatron_longstraw.rollout.in_progress import FinishedGroups
from megatron_longstraw.rollout.scoring import Scorer
from tests.distributed.launch import run_ranks
from tests.helpers import random_groups, tiny_trainer
from tests.training_runs import score, seed_generators, train

LAYOUTS = {
    "1 rank": (1, {}),
    "1 rank, bf16": (1, dict(bf16=True)),
    "dp2, distributed optimizer": (2, dict(use_distributed_optimizer=True)),
    "dp2, distributed optimizer, bf16, async": (2, dict(use_distributed_optimizer=True, bf16=True, async_save=True)),
    "dp2, optimizer on the host": (2, dict(use_distributed_optimizer=True, bf16=True, optimizer_cpu_offload=True)),
    "tp2 + sp": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "pp2 x vpp2": (2, dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2, num_layers=4)),
    "cp2, two updates a step": (2, dict(context_parallel_size=2, ppo_epochs=2)),
    "ep2": (2, dict(expert_model_parallel_size=2, num_experts=4, moe_ffn_hidden_size=32)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_going_on_is_exact(layout, tmp_path):
    """Same losses, rewards and learning rates, and the same weights to the last bit, wherever it stops (J03, J05, J06)."""
    world_size, options = LAYOUTS[layout]
    straight = run_ranks(train, world_size, 4, {name: value for name, value in options.items() if name != "async_save"})
    for stop in (1, 3) if world_size == 1 else (2,):
        saving = options | {"save": str(tmp_path / f"checkpoints{stop}")}
        run_ranks(train, world_size, stop, saving)
        resumed = run_ranks(train, world_size, 4, saving)
        for whole, rest in zip(straight, resumed):
            assert rest["history"] == whole["history"][stop:]
            assert rest["weights"] == whole["weights"]
            assert any(f"goes on after step {stop}" in note for note in rest["notes"])


CHANGES = {
    "tp2 to one": (2, dict(tensor_model_parallel_size=2), 1, {}),
    "one to cp2": (1, {}, 2, dict(context_parallel_size=2)),
    "dp2 distributed to pp2": (2, dict(use_distributed_optimizer=True), 2, dict(pipeline_model_parallel_size=2, use_distributed_optimizer=True)),
    "dp2, optimizer on the host to one": (
        2,
        dict(use_distributed_optimizer=True, bf16=True, optimizer_cpu_offload=True),
        1,
        dict(use_distributed_optimizer=True, bf16=True),
    ),
    "ep2 to one": (
        2,
        dict(expert_model_parallel_size=2, num_experts=4, moe_ffn_hidden_size=32),
        1,
        dict(num_experts=4, moe_ffn_hidden_size=32),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_going_on_under_another_layout(change, tmp_path):
    """Equal up to the order of sums (global random states belong to ranks, so the reward draws nothing here)."""
    before_ranks, before, after_ranks, after = CHANGES[change]
    options = {"save": str(tmp_path / "checkpoints"), "clip_grad": 0.5}
    run_ranks(train, before_ranks, 2, before | options, score)
    moved = run_ranks(train, after_ranks, 4, after | options, score)[0]
    straight = run_ranks(train, before_ranks, 4, before | {"clip_grad": 0.5}, score)[0]
    for step, values in enumerate(moved["history"]):
        for name in ("actor/grad_norm", "actor/lr"):  # the others are of this rank's prompts
            value = values[name]
            assert value == pytest.approx(straight["history"][2 + step][name], rel=1e-4, abs=1e-6), (step, name)


class Failure(Exception):
    pass


class FailsAtTheSecond(FinishedGroups):
    """Keeps one batch, and fails where it should keep the next."""

    num_kept = 0

    def keep(self, step, batch):
        self.num_kept += 1
        if self.num_kept == 2:
            raise Failure
        super().keep(step, batch)


def fail_and_go_on(rank: int, folder: str, options: dict):
    """Calls of the reward function before and after a failure in the middle of a step; the rewards and metrics then, and
    those of a step that never failed."""
    calls = []

    def reward(solution_str, **_):
        calls.append(solution_str)
        if len(solution_str) % 3 == 1:
            raise KeyError(solution_str)
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        return {"score": len(solution_str) % 4 + noise if len(solution_str) % 4 else None, "first": ord(solution_str[0])}

    def step_with(kept):
        scorer = Scorer(reward, "skip", lambda ids: "".join(chr(97 + token) for token in ids if token % 3))
        return RLStep(policy, optimizer, scorer, finished=kept)

    def run(step):
        seed_generators(5)  # as a checkpoint of the step's start does
        groups = random_groups(4, [30, 20, 25, 15], [])
        report = step.run(3, groups)
        return [[(b.reward, b.rewards) for b in group.branches] for group in report.groups], report.metrics.to_means()

    policy, optimizer = tiny_trainer(**options)
    with pytest.raises(Failure):
        run(step_with(FailsAtTheSecond(policy, folder)))
    before = len(calls)
    again = run(step_with(FinishedGroups(policy, folder)))
    after = len(calls) - before
    policy, optimizer = tiny_trainer(**options)
    return before, after, again, run(step_with(None))


@pytest.mark.parametrize("layout", [dict(context_parallel_size=2), dict(tensor_model_parallel_size=2), {}], ids=["cp2", "tp2", "dp2"])
def test_what_was_scored_before_a_failure_is_not_scored_again(layout, tmp_path):
    """One rank of a replica scores; all of them take what was kept, and end up with the same metrics."""
    ranks = run_ranks(fail_and_go_on, 2, str(tmp_path), layout)
    batches = 4 if layout else 2
    for rank, (before, after, again, straight) in enumerate(ranks):
        scores_here = rank == 0 or not layout
        assert (before, after) == ((2 * 4, (batches - 1) * 4) if scores_here else (0, 0))
        assert again == straight and again[1]["reward/failed"] > 0 and "reward/first" in again[1]
    if layout:
        assert ranks[0][2] == ranks[1][2]
