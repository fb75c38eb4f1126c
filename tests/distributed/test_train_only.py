"""A run on a rollout file, on two ranks: the file holds the groups of all, and each trains its own."""
import json
from pathlib import Path

import pytest
import torch

from megatron_longstraw.algorithm import RLStep
from megatron_longstraw.rollout.scoring import Scorer
from tests.helpers import tiny_trainer
from tests.train_only import STEPS, Prompts, reward, same_bits, sampled_and_trained_again

from .launch import run_ranks

LAYOUTS = {"dp2": {}, "cp2": {"context_parallel_size": 2}}


def sampled_metrics(rank: int) -> dict[str, float]:
    policy, optimizer = tiny_trainer(context_parallel_size=2)
    scorer = Scorer(reward, "fail", Prompts().render)
    return RLStep(policy, optimizer, scorer).run(0, Prompts().prompts(0, 2)).metrics.to_means()


@pytest.mark.dist
def test_metrics_of_rewards_are_alike_on_all_ranks_of_a_replica():
    """One of them calls the reward function."""
    first, second = run_ranks(sampled_metrics, 2)
    assert first == second and "reward/even" in first


def both(rank: int, folder: str, options: dict):
    return sampled_and_trained_again(Path(folder), **options)


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_again_from_the_file_ends_with_the_same_bits(layout, tmp_path):
    ranks = run_ranks(both, 2, str(tmp_path), LAYOUTS[layout])
    for (weights, metrics), (weights_again, metrics_again) in ranks:
        assert same_bits(weights, weights_again)
        assert metrics == metrics_again
    assert len(ranks[0][0][1]) == STEPS
    rows = [json.loads(line) for line in (tmp_path / "sampled" / "rollouts.jsonl").read_text().splitlines()]
    order = list(dict.fromkeys((row["step"], row["group_id"]) for row in rows))
    assert order == [(step, f"{step}-{i}") for step in range(STEPS) for i in range(3)], "the order of the batch"
    if layout == "dp2":
        first, second = ranks
        assert all(torch.equal(first[0][0][key], second[0][0][key]) for key in first[0][0])
