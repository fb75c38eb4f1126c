"""One RL step: what it computes, what it leaves alone, and what it refuses."""

import numpy as np
import pytest
import torch

from megatron_longstraw.algorithm import RLStep
from megatron_longstraw.gradients import Work, accumulate_gradients, advantages_of
from megatron_longstraw.mcore.calls import capture, full_sequences, score
from megatron_longstraw.mcore.packing import PromptBatch, batch_prompts
from megatron_longstraw.mcore.parameters import named_shards
from megatron_longstraw.objectives.policy_loss import PolicyObjective
from megatron_longstraw.prefix.store import StaleStoreError
from megatron_longstraw.rewards.loading import RewardError
from megatron_longstraw.rollout.generate import generate
from megatron_longstraw.rollout.scoring import Scorer
from megatron_longstraw.types import Branch, PromptGroup
from tests.helpers import gradients, random_groups, tiny_policy, tiny_trainer, weights, worst_relative_error

GRADIENT_TOLERANCE = 5e-6


def render(ids):
    return " ".join(map(str, ids))


def reward_of_ids(data_source, solution_str, ground_truth, extra_info):
    """Spread over responses, a function of nothing but the text."""
    return (sum(map(int, solution_str.split())) % 7) / 7.0


def rl_step(policy, optimizer, reward=reward_of_ids, policy_on_error="fail"):
    return RLStep(policy, optimizer, Scorer(reward, policy_on_error, render))


def fresh_prompts(num_groups=2, prompt_tokens=70):
    return [PromptGroup(group.prompt_ids, group_id=group.group_id) for group in random_groups(num_groups, prompt_tokens, [])]


def step_gradient(groups, **options):
    policy = tiny_policy(**options)
    batches = batch_prompts(groups, policy.config.prefix.prompts_per_microbatch)
    work = [Work(batch, advantages_of(batch, policy.config.algorithm)) for batch in batches]
    metrics = accumulate_gradients(policy, work, PolicyObjective()).to_means()
    return gradients(policy), metrics, policy


def test_prefix_runs_once_per_group_not_once_per_response():
    """F15: a shared-prefix option that does nothing costs 8 x 67 tokens instead of 63 + 32 + 63."""
    groups = random_groups(1, 64, [4] * 8)
    _, _, policy = step_gradient(groups)
    counts = {name: cost.tokens for name, cost in policy.meter.costs.items()}
    assert counts == {"capture": 63, "replay": 32, "prefix_backward": 63}
    _, _, policy = step_gradient(groups, schedule="full")
    assert {name: cost.tokens for name, cost in policy.meter.costs.items()} == {"full": 8 * 67}


def test_packing_changes_the_gradient_by_rounding_only():
    """The same branches in other micro-batches, with other batch mates, or as whole sequences."""
    groups = random_groups(3, [70, 70, 33], [5, 1, 8, 3])
    reference, metrics, _ = step_gradient(groups, schedule="full")
    for options in (
        {"branches_per_microbatch": 1},
        {"branches_per_microbatch": 3},
        {"prompts_per_microbatch": 2},
        {"prefix_chunk_tokens": 7, "prefix_block_tokens": 5},
        {"prefix_out_tier": "none", "recompute_granularity": "full"},
        {"log_probs_chunk_size": 3},
    ):
        actual, other, _ = step_gradient(groups, **options)
        assert worst_relative_error(actual, reference) < GRADIENT_TOLERANCE, options
        assert other["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], abs=1e-7), options
        assert other["actor/entropy"] == pytest.approx(metrics["actor/entropy"], rel=1e-5), options


def test_gradient_accumulates_over_prompts_with_one_global_denominator():
    """B04: token-mean over the step; per-prompt means would over-weight the prompt with few tokens."""
    groups = random_groups(2, 40, [2, 1]) + random_groups(1, 50, [8, 8, 7, 8], seed=5)
    together, _, _ = step_gradient(groups)
    tokens = [sum(branch.num_tokens for branch in group.branches) for group in groups]
    parts = [step_gradient([group])[0] for group in groups]
    weighted = {
        key: sum(part[key] * count for part, count in zip(parts, tokens)) / sum(tokens) for key in together
    }
    assert worst_relative_error(together, weighted) < GRADIENT_TOLERANCE


def test_branches_do_not_see_each_other():
    """F17: changing one response changes no log-prob of another, nor does their order."""
    policy = tiny_policy()
    (group,) = random_groups(1, 40, [6, 4, 5])

    def logprobs(branches):
        batch = PromptBatch([PromptGroup(group.prompt_ids, branches)])
        return score(policy, capture(policy, batch), batch)[0]

    before = logprobs(group.branches)
    changed = Branch((group.branches[0].response_ids + 1) % 60)
    after = logprobs([changed, *group.branches[1:]])
    assert not np.array_equal(before[0, 0], after[0, 0])
    for index in (1, 2):
        np.testing.assert_array_equal(before[0, index], after[0, index])
    turned = logprobs(group.branches[::-1])
    np.testing.assert_allclose(turned[0, 2], before[0, 0], atol=1e-6)


def test_the_state_of_a_prompt_does_not_depend_on_what_follows():
    """F20: equal bits for responses of any length, and their log-probs are those of whole sequences to rounding."""
    policy = tiny_policy()
    (group,) = random_groups(1, 70, [64])
    response = group.branches[0].response_ids
    states = []
    for length in (1, 5, 64):
        batch = PromptBatch([PromptGroup(group.prompt_ids, [Branch(response[:length])])])
        store = capture(policy, batch)
        replayed = score(policy, store, batch)[0][0, 0]
        whole = full_sequences(policy, batch, None)[0][0, 0]
        np.testing.assert_allclose(replayed, whole, atol=5e-6)
        states.append([(block.k.clone(), block.v.clone()) for state in store.layers.values() for block in state.blocks(69)])
    for other in states[1:]:
        assert all(torch.equal(x, y) for blocks in zip(states[0], other) for x, y in zip(*blocks))


def test_a_step_without_signal_leaves_everything_untouched():
    """B12: Adam's momentum and weight decay would move the weights even at gradient zero."""
    policy, optimizer = tiny_trainer(lr_decay_style="linear", lr_decay_iters=10, train_iters=10)
    step = rl_step(policy, optimizer)
    assert step.run(0, fresh_prompts()).updates == 1
    before, lr, version = weights(policy), optimizer.lr, policy.weights_version
    silent = rl_step(policy, optimizer, reward=lambda **_: 0.5)
    report = silent.run(1, fresh_prompts())
    assert (report.updates, report.skipped) == (0, ["no signal"])
    assert all(torch.equal(before[key], value) for key, value in weights(policy).items())
    assert (optimizer.lr, policy.weights_version) == (lr, version)


def test_fully_masked_responses_are_no_signal_and_do_not_count():
    """B10, D07: a masked sample enters neither numerator nor denominator."""
    (group,) = random_groups(1, 40, [4, 6])
    alone, _, _ = step_gradient([group])
    longer = PromptGroup(group.prompt_ids, [*group.branches, Branch(np.arange(8), loss_mask=np.zeros(8), reward=None)])
    with_masked, _, _ = step_gradient([longer])
    assert worst_relative_error(with_masked, alone) < GRADIENT_TOLERANCE


def test_empty_and_unscored_responses_are_accepted_with_weight_zero():
    """A09, A10, D08: left out of the group's statistics and of the loss."""
    (group,) = random_groups(1, 40, [4, 6])
    alone, _, _ = step_gradient([group])
    extra = [Branch([], reward=10.0), Branch([1, 2, 3], reward=None)]
    accepted, metrics, _ = step_gradient([PromptGroup(group.prompt_ids, [*group.branches, *extra])])
    assert worst_relative_error(accepted, alone) < GRADIENT_TOLERANCE
    assert np.isfinite(metrics["actor/pg_loss"])


def test_loss_mask_selects_the_tokens_that_train():
    """D12: tokens the policy did not write condition what follows and carry no loss."""
    (group,) = random_groups(1, 40, [6, 6])
    mask = np.array([0, 0, 1, 1, 1, 1])
    masked = [Branch(branch.response_ids, loss_mask=mask, reward=branch.reward) for branch in group.branches]
    moved = [
        Branch(branch.response_ids[2:], reward=branch.reward) for branch in group.branches
    ]
    actual, _, _ = step_gradient([PromptGroup(group.prompt_ids, [masked[0], *masked[1:]])])
    # One prompt per branch, the unmasked head of the response moved into the prompt: the same trained tokens.
    policy = tiny_policy()
    advantages = advantages_of(PromptBatch([PromptGroup(group.prompt_ids, masked)]), policy.config.algorithm)
    work = [
        Work(
            PromptBatch([PromptGroup(np.concatenate([group.prompt_ids, branch.response_ids[:2]]), [moved[index]])]),
            {(0, 0): advantages[0, index]},
        )
        for index, branch in enumerate(group.branches)
    ]
    accumulate_gradients(policy, work, PolicyObjective())
    assert worst_relative_error(gradients(policy), actual) < GRADIENT_TOLERANCE


@pytest.mark.parametrize("mini", [1, 2])
def test_several_updates_per_step_match_whole_sequences(mini):
    """ppo_epochs and mini-batches: old log-probs from before the first update, a capture for each later one."""
    # A large eps makes Adam's update proportional to the gradient; at the usual one it is its sign, and rounding
    # of entries near zero would be all that is compared.
    options = dict(ppo_epochs=2, ppo_mini_batch_size=mini, lr=0.1, adam_eps=1.0, weight_decay=0.0, clip_ratio=0.1)
    results = []
    for schedule in ("branch", "full"):
        policy, optimizer = tiny_trainer(schedule=schedule, **options)
        report = rl_step(policy, optimizer).run(0, fresh_prompts())
        results.append((weights(policy), report.metrics.to_means(), report.updates))
    assert results[0][2] == results[1][2] == 2 * (2 // mini)
    assert worst_relative_error(results[0][0], results[1][0]) < 1e-4
    assert results[0][1]["actor/pg_clipfrac"] == pytest.approx(results[1][1]["actor/pg_clipfrac"], abs=0.02)
    assert results[0][1]["actor/pg_clipfrac"] > 0, "the updates are large enough for clipping to act"
    assert results[0][1]["actor/ratio_max"] > 1.05


def test_the_gradient_after_an_optimizer_step_is_that_of_the_weights():
    """An optimizer step leaves parameter.grad aliased to main_grad; the next gradient must not count it twice."""
    policy, optimizer = tiny_trainer()
    groups = random_groups(2, 40, [3, 4])
    work = lambda: [Work(batch, advantages_of(batch, policy.config.algorithm)) for batch in batch_prompts(groups, 1)]
    accumulate_gradients(policy, work(), PolicyObjective())
    optimizer.step()
    accumulate_gradients(policy, work(), PolicyObjective())
    after, moved = gradients(policy), weights(policy)
    fresh = tiny_policy()
    with torch.no_grad():
        for shard, parameter in named_shards(fresh.chunks, fresh.config.model):
            parameter.copy_(moved[shard.key])
    fresh.weights_changed()
    policy = fresh
    accumulate_gradients(policy, work(), PolicyObjective())
    assert worst_relative_error(after, gradients(policy)) < GRADIENT_TOLERANCE


def test_first_update_ratio_is_exactly_one():
    policy, optimizer = tiny_trainer()
    metrics = rl_step(policy, optimizer).run(0, fresh_prompts()).metrics.to_means()
    assert (metrics["actor/ratio_mean"], metrics["actor/ratio_max"], metrics["actor/ppo_kl"]) == (1.0, 1.0, 0.0)


def test_old_logprobs_of_an_unmoved_policy_give_ratio_one_to_the_last_bit():
    """DESIGN rule 15: score and replay share packing and kernels."""
    policy, optimizer = tiny_trainer(ppo_epochs=2, lr=0.0, weight_decay=0.0)
    metrics = rl_step(policy, optimizer).run(0, fresh_prompts()).metrics.to_means()
    assert (metrics["actor/ratio_mean"], metrics["actor/ratio_max"]) == (1.0, 1.0)


@pytest.mark.parametrize("budget, captures", [(0, 6), (50_000, 5)])
def test_state_budget_trades_captures_for_bytes_and_nothing_else(budget, captures):
    """A store takes about 37 KB here, so 50,000 bytes keep one of three."""
    ends = []
    for kept in (None, budget):
        policy, optimizer = tiny_trainer(prefix_state_budget=kept, train_batch_size=3)
        rl_step(policy, optimizer).run(0, fresh_prompts(3))
        ends.append((weights(policy), policy.meter.costs["capture"].calls))
    assert all(torch.equal(ends[0][0][key], ends[1][0][key]) for key in ends[0][0])
    assert ends[0][1] == 3
    assert ends[1][1] == captures


def test_a_store_of_other_weights_is_refused():
    policy, optimizer = tiny_trainer()
    batch = PromptBatch(random_groups(1, 40, [4]))
    store = capture(policy, batch)
    rl_step(policy, optimizer).run(0, fresh_prompts())
    with pytest.raises(StaleStoreError, match="Capture again"):
        score(policy, store, batch)


def test_forgetting_to_say_that_weights_changed_is_detected():
    policy = tiny_policy()
    batch = PromptBatch(random_groups(1, 40, [4]))
    store = capture(policy, batch)
    with torch.no_grad():
        next(policy.chunks[0].parameters())[3, 3] += 1e-6
    with pytest.raises(StaleStoreError, match="weights_changed"):
        score(policy, store, batch)


def poisoned(policy):
    """Make the gradient of one parameter NaN, as an overflow in backward would."""
    return next(policy.chunks[0].parameters()).register_hook(lambda grad: grad * float("nan"))


def test_a_nonfinite_gradient_skips_the_update_and_leaves_the_weights():
    policy, optimizer = tiny_trainer()
    hook, before, lr = poisoned(policy), weights(policy), optimizer.lr
    report = rl_step(policy, optimizer).run(0, fresh_prompts())
    assert (report.updates, report.skipped) == (0, ["not finite"])
    assert all(torch.equal(before[key], value) for key, value in weights(policy).items())
    hook.remove()
    assert rl_step(policy, optimizer).run(1, fresh_prompts()).updates == 1
    assert optimizer.lr == lr


@pytest.mark.parametrize("on_error, rewards", [("zero", {0.0}), ("skip", {None})])
def test_failing_rewards_follow_the_policy(on_error, rewards):
    policy, optimizer = tiny_trainer()

    def broken(**_):
        raise ZeroDivisionError("user code")

    report = rl_step(policy, optimizer, broken, on_error).run(0, fresh_prompts())
    assert {branch.reward for group in report.groups for branch in group.branches} == rewards
    assert report.metrics.to_means()["reward/failed"] == 8
    with pytest.raises(RewardError, match="--reward-error-policy"):
        rl_step(policy, optimizer, broken, "fail").run(0, fresh_prompts())


def test_stop_ids_end_a_response_and_are_trained():
    """D03, D04: several stop ids, each kept in the response with weight."""
    policy = tiny_policy(stop_token_ids=tuple(range(0, 60, 3)), group_size=16)
    batch = PromptBatch(fresh_prompts(1))
    generate(policy, capture(policy, batch), batch, step=0)
    branches = batch.groups[0].branches
    stopped = [branch for branch in branches if branch.finish_reason == "stop"]
    assert stopped and len({branch.response_ids[-1] for branch in stopped}) > 1
    for branch in branches:
        assert all(token % 3 for token in branch.response_ids[:-1])
        assert (branch.response_ids[-1] % 3 == 0) == (branch.finish_reason == "stop")
        assert branch.loss_mask.sum() == branch.num_tokens == len(branch.rollout_logprobs)
        assert branch.finish_reason == "stop" or branch.num_tokens == 8


def test_sampling_depends_on_seed_and_step_only():
    def sampled(seed, step, **options):
        policy = tiny_policy(seed=seed, **options)
        batch = PromptBatch(fresh_prompts(1))
        generate(policy, capture(policy, batch), batch, step=step)
        return [branch.response_ids.tolist() for branch in batch.groups[0].branches]

    assert sampled(11, 0) == sampled(11, 0)
    assert sampled(11, 0) == sampled(11, 0, prefix_chunk_tokens=9)
    assert sampled(11, 0) != sampled(11, 1)


def test_top_p_records_the_distribution_that_was_sampled():
    """C04: the recorded log-prob is renormalised over the nucleus, so it lies above the full-vocabulary one."""
    policy = tiny_policy(top_p=0.5, temperature=0.7)
    batch = PromptBatch(fresh_prompts(1))
    store = capture(policy, batch)
    generate(policy, store, batch, step=0)
    scored, _ = score(policy, store, batch)
    gaps = np.concatenate(
        [branch.rollout_logprobs - scored[0, i] for i, branch in enumerate(batch.groups[0].branches)]
    )
    assert (gaps > 0).all() and (gaps <= np.log(1 / 0.5) + 1e-5).all()


@pytest.mark.parametrize("group_size", [1, 64])
def test_group_sizes(group_size):
    """A04: a group of one has advantage 0, which is no signal and no NaN."""
    policy, optimizer = tiny_trainer(group_size=group_size)
    report = rl_step(policy, optimizer).run(0, fresh_prompts(1))
    assert len(report.groups[0].branches) == group_size
    assert report.updates == (0 if group_size == 1 else 1)


def test_prompts_of_one_token():
    policy, optimizer = tiny_trainer()
    report = rl_step(policy, optimizer).run(0, fresh_prompts(2, 1))
    assert report.updates == 1


def test_dropout_is_zero_in_the_built_model():
    """C08: Megatron's own default is 0.1."""
    config = tiny_policy().megatron_config
    assert (config.hidden_dropout, config.attention_dropout) == (0.0, 0.0)




def weights_after(num_steps, name, gradient, **options):
    """A weight of a bfloat16 model after so many steps of Adam under a constant gradient: (before, after) of its float32
    master copy, and of the model's own."""
    policy, optimizer = tiny_trainer(bf16=True, clip_grad=0.0, lr_decay_style="constant", lr_warmup_iters=0, **options)
    (parameter,) = (parameter for shard, parameter in named_shards(policy.chunks, policy.config.model) if shard.name == name)
    copies = (parameter.main_param, parameter.detach())
    before = [copy.double().norm().item() for copy in copies]
    for _ in range(num_steps):
        policy.zero_grad()
        parameter.main_grad.fill_(gradient)
        optimizer.step()
    return [(old, copy.double().norm().item()) for old, copy in zip(before, copies)]


@pytest.mark.parametrize(("lr", "num_steps", "factor"), [(6e-4, 100, 0.94), (1e-6, 1000, 0.999)])
def test_small_updates_add_up(lr, num_steps, factor):
    """L05: added to a bfloat16 weight of 1, each of them would be rounded away."""
    master, model = weights_after(num_steps, "decoder.final_layernorm.weight", 1.0, lr=lr, weight_decay=0.0)
    assert master[1] == pytest.approx(factor * master[0], rel=2e-5)
    assert model[1] == pytest.approx(factor * model[0], rel=2**-8)


def test_small_weight_decay_adds_up():
    """L06: the factor 1 - 1e-7 is 1 in bfloat16."""
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    master, _ = weights_after(1000, name, 0.0, lr=1e-5, weight_decay=0.01)
    assert 0.8e-4 < 1 - master[1] / master[0] < 1.2e-4
