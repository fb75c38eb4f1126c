"""Training on a rollout file instead of sampling."""
import json

import numpy as np
import pytest

from megatron_longstraw import train
from megatron_longstraw.algorithm import RLStep
from megatron_longstraw.config import load_config
from megatron_longstraw.data.rollout_files import RolloutReader, RolloutWriter
from megatron_longstraw.gradients import Work, accumulate_gradients, advantages_of
from megatron_longstraw.mcore.calls import capture, score
from megatron_longstraw.mcore.packing import PromptBatch, batch_prompts
from megatron_longstraw.objectives.policy_loss import PolicyObjective
from megatron_longstraw.types import Branch, PromptGroup
from tests.helpers import gradients, random_groups, tiny_policy, tiny_trainer, worst_relative_error
from tests.train_only import OPTIONS, STEPS, run, same_bits, sampled_and_trained_again

UPDATES = {"one update": {}, "several updates": {"ppo_epochs": 2, "ppo_mini_batch_size": 1}}


@pytest.mark.parametrize("updates", UPDATES)
def test_training_again_from_the_file_ends_with_the_same_bits(updates, tmp_path):
    (first, metrics), (again, metrics_again) = sampled_and_trained_again(tmp_path, **UPDATES[updates])
    assert same_bits(first, again)
    assert metrics == metrics_again and len(metrics) == STEPS
    assert {"reward/even", "reward/abstained", "critic/score/mean", "response_length/clip_ratio"} <= metrics[0].keys()
    assert sum(line["reward/abstained"] for line in metrics) > 0
    assert not (tmp_path / "again" / "rollouts.jsonl").exists(), "nothing was sampled"


def test_other_rollouts_give_other_weights(tmp_path):
    """The comparison above can fail."""
    first, _ = run(tmp_path / "sampled")
    path = tmp_path / "sampled" / "rollouts.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    next(row for row in rows if row["reward"])["response_ids"][0] ^= 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    again, _ = run(tmp_path / "again", rollout_file=str(path))
    assert not same_bits(first, again)


def file_of(path, groups, step=0):
    RolloutWriter(path).write(step, groups)
    return RolloutReader(path, 2**20)


def test_trained_ids_are_those_of_the_file(tmp_path):
    """I03: nothing decodes and encodes them again."""
    reader = file_of(tmp_path / "r.jsonl", random_groups(2, 20, [5, 1, 8]))
    policy, optimizer = tiny_trainer()
    report = RLStep(policy, optimizer, None).run(0, reader.prompts(0, 2))
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    trained = [branch.response_ids.tolist() for group in report.updated for branch in group.branches]
    assert trained == [row["response_ids"] for row in rows] and report.updates == 1
    assert policy.meter.tokens("replay") == 2 * 14 and policy.meter.tokens("rollout") == 0


def test_a_prompt_is_captured_once_for_one_update():
    """A budget that keeps no state from sampling to update costs nothing where nothing is sampled."""
    policy, optimizer = tiny_trainer(prefix_state_budget=0)
    RLStep(policy, optimizer, None).run(0, random_groups(2, 20, [5, 1, 8]))
    assert policy.meter.tokens("capture") == 2 * 19


def test_groups_without_responses_are_refused():
    policy, optimizer = tiny_trainer()
    with pytest.raises(ValueError, match="group 'a' has no responses"):
        RLStep(policy, optimizer, None).run(0, [PromptGroup([1, 2, 3], group_id="a")])


def test_old_logprobs_are_those_of_the_policy_that_trains(tmp_path):
    """Rollouts of other weights: ratios start at 1, and how far the two policies are apart is reported (C04, N05)."""
    rng = np.random.default_rng(0)
    groups = random_groups(2, 20, [6, 4])
    for group in groups:
        for branch in group.branches:
            branch.rollout_logprobs = -3 - rng.random(branch.num_tokens).astype(np.float32)
            branch.loss_mask[1] = 0
            branch.rollout_logprobs[1] = 0
    reader = file_of(tmp_path / "r.jsonl", groups)
    policy, optimizer = tiny_trainer()
    batch = PromptBatch(groups)
    scored = score(policy, capture(policy, batch), batch)[0]
    sampled = {place: groups[place[0]].branches[place[1]].rollout_logprobs for place in scored}
    written = [{place: np.delete(values, 1) for place, values in table.items()} for table in (sampled, scored)]
    rollout, own = (np.concatenate(list(table.values())).astype(np.float64) for table in written)
    report = RLStep(policy, optimizer, None).run(0, reader.prompts(0, 2))
    metrics = report.metrics.to_means()
    assert (metrics["actor/ratio_mean"], metrics["actor/ratio_max"]) == (1.0, 1.0)
    assert report.metrics.means["training/rollout_probs_diff_mean"][1] == len(rollout) == 16
    difference = np.abs(np.exp(rollout) - np.exp(own))
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(difference.mean(), rel=1e-5)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(difference.max(), rel=1e-5)
    assert metrics["rollout_corr/kl"] == pytest.approx((rollout - own).mean(), rel=1e-5)


def test_several_updates_compare_with_the_policy_of_the_step_start(tmp_path):
    """Else the second update's mismatch would be that of moved weights."""
    groups = random_groups(1, 20, [6, 4])
    for branch in groups[0].branches:
        branch.rollout_logprobs = np.full(branch.num_tokens, -3, dtype=np.float32)
    reports = []
    for epochs in (1, 3):
        reader = file_of(tmp_path / "r.jsonl", groups)
        policy, optimizer = tiny_trainer(ppo_epochs=epochs, lr=0.1)
        reports.append(RLStep(policy, optimizer, None).run(0, reader.prompts(0, 1)).metrics.to_means())
    one, three = reports
    assert one["rollout_corr/kl"] == pytest.approx(three["rollout_corr/kl"], rel=1e-6)
    assert three["actor/ratio_max"] > 1.05


def test_rows_without_logprobs_train_and_report_no_mismatch(tmp_path):
    """C06: missing is not 0.0."""
    reader = file_of(tmp_path / "r.jsonl", random_groups(1, 20, [3, 4]))
    policy, optimizer = tiny_trainer()
    report = RLStep(policy, optimizer, None).run(0, reader.prompts(0, 1))
    assert report.updates == 1
    assert not any("rollout" in name for name in report.metrics.to_means())


def step_gradient(groups, **options):
    policy = tiny_policy(**options)
    work = [Work(batch, advantages_of(batch, policy.config.algorithm)) for batch in batch_prompts(groups, 1)]
    accumulate_gradients(policy, work, PolicyObjective())
    return gradients(policy)


def test_tool_output_conditions_and_does_not_train(tmp_path):
    """D12: a turn, two tokens of tool output, another turn; the gradient is that of whole sequences with the same mask,
    and changes with the tool's tokens only through what they condition."""
    (group,) = random_groups(1, 20, [7, 7])
    for branch in group.branches:
        branch.loss_mask = np.array([1, 1, 0, 0, 1, 1, 1], dtype=np.float32)
    (read,) = file_of(tmp_path / "r.jsonl", [group]).prompts(0, 1)
    assert worst_relative_error(step_gradient([read]), step_gradient([group], schedule="full")) < 5e-6
    policy, optimizer = tiny_trainer()
    report = RLStep(policy, optimizer, None).run(0, [read])
    assert report.metrics.means["actor/ratio_mean"][1] == 10, "loss tokens of two responses"


def test_an_empty_response_trains_nothing_and_the_step_completes(tmp_path):
    """D08"""
    (group,) = random_groups(1, 20, [3, 4, 5])
    alone = step_gradient([group])
    longer = PromptGroup(group.prompt_ids, [*group.branches, Branch([], reward=10.0)])
    (read,) = file_of(tmp_path / "r.jsonl", [longer]).prompts(0, 1)
    assert worst_relative_error(step_gradient([read]), alone) < 5e-6
    path = tmp_path / "r.jsonl"
    _, (metrics,) = run(tmp_path / "run", with_prompts=False, rollout_file=str(path), train_iters=1, train_batch_size=1)
    assert metrics["training/updates"] == 1 and metrics["reward/empty"] == 1
    assert all(np.isfinite(value) for value in metrics.values())


def test_rollouts_are_there_to_look_at_when_the_update_fails(tmp_path):
    policy, optimizer = tiny_trainer()
    next(policy.chunks[0].parameters()).register_hook(lambda grad: grad * float("nan"))
    saved = []
    step = RLStep(policy, optimizer, None, save=lambda step, groups: saved.append((step, len(groups))))
    assert step.run(4, random_groups(2, 20, [3, 4])).skipped == ["not finite"]
    assert saved == [(4, 2)]


RUN = OPTIONS | {"prompt_function": None, "train_iters": 2}
BAD_RUNS = [
    ({"train_iters": 3}, ["last step is 1", "--train-iters"]),
    ({"train_batch_size": 2}, ["step 0 has 3 groups, need 2", "--train-batch-size"]),
    ({"vocab_size": 30}, ["row ", "group '0-", "branch ", "--vocab-size"]),
    ({"max_response_length": 1}, ["row ", "--max-response-length"]),
    ({"max_prompt_length": 32}, ["row 1:", "33 tokens", "--max-prompt-length"]),
    ({"max_row_bytes": 200}, ["row ", "--max-row-bytes"]),
    ({"rollout_file": "nowhere.jsonl"}, ["nowhere.jsonl", "--rollout-file"]),
    ({"prompt_function": f"{__name__}:truncated"}, ["row 1: group '0-0' of step 0 was", "33 and 8 tokens"]),
    ({"rollout_file": None}, ["--prompt-function"]),
]


def truncated(config):
    """I10: the sampling run saw whole prompts, this one trains on their ends."""

    class Ends:
        def prompts(self, step, num_prompts):
            from tests.train_only import Prompts

            groups = Prompts().prompts(step, num_prompts)
            return [PromptGroup(group.prompt_ids[-8:], group_id=group.group_id) for group in groups]

    return Ends()


@pytest.fixture(scope="module")
def rollout_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampled")
    run(folder, train_iters=2)
    return folder / "rollouts.jsonl"


@pytest.mark.parametrize("options, words", BAD_RUNS, ids=[words[-1] for _, words in BAD_RUNS])
def test_a_file_that_does_not_suit_the_run_is_refused_at_once(options, words, rollout_file, tmp_path):
    own = {"rollout_file": str(rollout_file), "run_dir": str(tmp_path / "run"), "stop_token_ids": ()}
    options = RUN | own | options
    with pytest.raises(ValueError) as error:
        train.run(load_config(overrides=options))
    for word in words:
        assert word in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_run_with_the_prompts_that_were_sampled_from(rollout_file, tmp_path):
    """As from a shell: the flags of the sampling run and --rollout-file."""
    options = OPTIONS | {"train_iters": 2, "rollout_file": str(rollout_file), "run_dir": str(tmp_path / "run")}
    train.run(load_config(overrides=options))
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_saving_can_be_turned_off(tmp_path):
    run(tmp_path / "run", train_iters=1, save_rollouts=False)
    assert not (tmp_path / "run" / "rollouts.jsonl").exists()
