"""The same RL step under other layouts: same responses, rewards and metrics, same weights afterwards to rounding."""
import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_longstraw.algorithm import RLStep
from megatron_longstraw.gradients import Work, accumulate_gradients, advantages_of, in_step
from megatron_longstraw.mcore.calls import capture, score
from megatron_longstraw.mcore.packing import batch_prompts
from megatron_longstraw.objectives.policy_loss import PolicyObjective
from megatron_longstraw.rewards.loading import RewardError
from megatron_longstraw.rollout.scoring import Scorer
from megatron_longstraw.train import merge
from megatron_longstraw.types import Branch, PromptGroup
from tests.helpers import gradients, random_groups, tiny_trainer, weights, worst_relative_error

from .launch import RankFailure, run_ranks

LAYOUTS = {
    "cp2": (2, dict(context_parallel_size=2)),
    "pp2": (2, dict(pipeline_model_parallel_size=2, recompute_granularity="full")),
    "pp2 vpp2": (2, dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)),
    "tp2 sp": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "dp2": (2, {}),
    "dp2, distributed optimizer": (2, dict(use_distributed_optimizer=True, overlap_grad_reduce=True)),
}
# Prompts of several lengths; a vocabulary that needs padding; an optimizer step that is proportional to the gradient.
OPTIONS = dict(num_layers=4, train_batch_size=3, ppo_epochs=2, lr=0.1, adam_eps=1.0, stop_token_ids=(1, 2, 3, 4, 5, 6))
PROMPT_TOKENS = [70, 33, 1]


def reward(data_source, solution_str, ground_truth, extra_info):
    return (sum(map(int, solution_str.split())) % 7) / 7.0


def rl_step(rank: int, options: dict) -> dict:
    policy, optimizer = tiny_trainer(**OPTIONS | options)
    groups = [
        PromptGroup(group.prompt_ids, group_id=group.group_id) for group in random_groups(3, PROMPT_TOKENS, [])
    ]
    step = RLStep(policy, optimizer, Scorer(reward, "fail", lambda ids: " ".join(map(str, ids))))
    report = step.run(0, groups)
    responses = {
        group.group_id: [(branch.response_ids.tolist(), branch.reward, branch.finish_reason) for branch in group.branches]
        for group in report.groups
    }
    return {
        "responses": responses,
        "metrics": merge(policy, report.metrics).to_means(),
        "weights": weights(policy),
    }


@pytest.fixture(scope="module")
def one_rank():
    return run_ranks(rl_step, 1, {})[0]


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_does_not_depend_on_the_layout(layout, one_rank):
    """F02, B05, B13, N01: sums over ranks count everything once; sampling is keyed by what is sampled."""
    world_size, options = LAYOUTS[layout]
    ranks = run_ranks(rl_step, world_size, options)
    responses = {key: value for rank in ranks for key, value in rank["responses"].items()}
    assert responses == one_rank["responses"]
    for rank in ranks:
        for name, value in one_rank["metrics"].items():
            assert rank["metrics"][name] == pytest.approx(value, rel=2e-5, abs=2e-6), name
    cut = {name for rank in ranks for name, tp_rank in rank["weights"] if tp_rank > 0}
    for rank in ranks:
        for (name, _), value in rank["weights"].items():
            if name not in cut:  # tensor-parallel slices are compared by the gradient tests
                expected = one_rank["weights"][name, 0]
                assert float((value - expected).norm() / expected.norm()) < 1e-5, name


def counted(rank: int, options: dict) -> float:
    policy, _ = tiny_trainer(**options)
    prompt = np.arange(20)
    branches = [Branch([1, 2, 3, 4], reward=1.0), Branch([], reward=5.0), Branch([1, 2], reward=0.0)]
    batches = batch_prompts([PromptGroup(prompt, branches)], 1)
    work = [Work(batch, advantages_of(batch, policy.config.algorithm)) for batch in batches]
    metrics = accumulate_gradients(policy, work, PolicyObjective())
    return metrics.means["actor/ratio_mean"][1]


@pytest.mark.dist
def test_token_count_does_not_depend_on_context_parallelism():
    """B13: responses of 4, 0 and 2 tokens are 6 tokens, whatever the split."""
    assert run_ranks(counted, 1, {}) == [6.0]
    assert run_ranks(counted, 2, dict(context_parallel_size=2)) == [6.0, 6.0]


def disagreeing(rank: int) -> None:
    policy, _ = tiny_trainer(context_parallel_size=2)
    groups = random_groups(1, 30 + dist.get_rank(), [3, 4])
    batches = batch_prompts(groups, 1)
    work = [Work(batch, advantages_of(batch, policy.config.algorithm)) for batch in batches]
    accumulate_gradients(policy, work, PolicyObjective())


@pytest.mark.dist
def test_ranks_of_a_replica_with_different_data_are_refused():
    """F11: they would hang in a collective, or mix up tokens."""
    with pytest.raises(RankFailure, match="hold different prompts"):
        run_ranks(disagreeing, 2)


def failing_reward(rank: int) -> str:
    policy, optimizer = tiny_trainer(context_parallel_size=2)
    groups = [PromptGroup(np.arange(9))]

    def broken(**_):
        raise KeyError("no such answer")

    step = RLStep(policy, optimizer, Scorer(broken, "fail", str))
    before = torch.cat([value.flatten() for value in weights(policy).values()])
    try:
        step.run(0, groups)
    except RewardError as error:
        after = torch.cat([value.flatten() for value in weights(policy).values()])
        return str(error) if torch.equal(before, after) else "weights moved"
    return "no error"


@pytest.mark.dist
def test_a_failing_reward_stops_every_rank_with_the_reason():
    """The function runs on one rank only; the others must not wait for its answer for ever."""
    for message in run_ranks(failing_reward, 2):
        assert "--reward-error-policy" in message and "KeyError" in message


def one_token_each(rank: int, options: dict) -> float:
    """Log-prob of a response of one token to a prompt of one token."""
    policy, _ = tiny_trainer(**options)
    (batch,) = batch_prompts([PromptGroup([8], [Branch([9])])], 1)
    return float(score(policy, capture(policy, batch, walk_back=False), batch)[0][0, 0][0])


@pytest.mark.dist
def test_a_prompt_and_a_response_of_one_token_each():
    """D10: every rank has at least a pad to work on."""
    layout = dict(tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=2)
    (alone,) = run_ranks(one_token_each, 1, {})
    assert run_ranks(one_token_each, 4, layout) == pytest.approx([alone] * 4, abs=1e-5)


def uneven_gradients(rank: int, options: dict) -> tuple[int, dict]:
    """How many micro-batches of prompts this rank has of its own, and its gradients of all ranks' prompts."""
    policy, _ = tiny_trainer(num_experts=4, moe_ffn_hidden_size=32, **options)
    groups = random_groups(4, [90, 20, 3, 40], [4, 1, 6])
    own = groups if policy.layout.dp_size == 1 else [groups[:1], groups[1:]][rank]
    batches = batch_prompts(own, 1)
    work = [Work(batch, advantages_of(batch, policy.config.algorithm)) for batch in in_step(policy, batches)]
    accumulate_gradients(policy, work, PolicyObjective())
    return len(batches), gradients(policy)


@pytest.mark.dist
def test_expert_parallel_ranks_with_different_numbers_of_micro_batches():
    """K09: one long prompt here, three short ones there; empty ones make up the difference and weigh nothing."""
    ((_, alone),) = run_ranks(uneven_gradients, 1, {})
    ranks = run_ranks(uneven_gradients, 2, dict(expert_model_parallel_size=2))
    assert [count for count, _ in ranks] == [1, 3]
    for _, own in ranks:
        assert worst_relative_error(own, {key: alone[key] for key in own}) < 1e-5
    assert {key for _, own in ranks for key in own} == set(alone)
