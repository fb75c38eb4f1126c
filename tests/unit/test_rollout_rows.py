"""One row of a rollout file, and what rows of a group mean for training."""
import json

import numpy as np
import pytest

from megatron_longstraw.config import AlgorithmConfig
from megatron_longstraw.data.rollout_groups import GroupOrder, format_group
from megatron_longstraw.data.rollout_rows import Limits, parse_rollout_row
from megatron_longstraw.data.rows import RowError
from megatron_longstraw.gradients import Work, advantages_of
from megatron_longstraw.mcore.packing import PromptBatch
from megatron_longstraw.objectives.aggregation import count
from megatron_longstraw.objectives.mismatch import rollout_mismatch
from megatron_longstraw.rollout.scoring import report_of, rollout_metrics
from megatron_longstraw.types import Branch, PromptGroup, prompt_digest

NO_STD = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
PROMPT = [5, 6, 7, 8, 9, 10, 11]


def row_of(**fields):
    return {
        "step": 3, "group_id": "g7", "branch": 1, "prompt_digest": prompt_digest(PROMPT),
        "response_ids": [1, 2, 3, 4, 5], "reward": 1.0,
    } | fields  # fmt: skip


def branch_of(**fields):
    return parse_rollout_row(row_of(**fields)).to_branch()


def group_of(*rows):
    """A group as a reader makes it of the rows' own fields."""
    order, group = GroupOrder(), None
    for index, fields in enumerate(rows):
        row = parse_rollout_row(row_of(branch=index, **({"prompt_ids": PROMPT} if index == 0 else {})) | fields)
        if order.follow(row):
            group = row.to_group(row.prompt_ids)
        group.branches.append(row.to_branch())
    order.finish()
    return group


def refused(match, **fields):
    with pytest.raises(RowError, match=match) as error:
        parse_rollout_row(row_of(**fields))
    return str(error.value)


def read_back(group, step=3):
    order, groups = GroupOrder(), []
    for line in format_group(step, group).splitlines():
        row = parse_rollout_row(json.loads(line))
        if order.follow(row):
            groups.append(row.to_group(row.prompt_ids))
        groups[-1].branches.append(row.to_branch())
    (read,) = groups
    return read


def test_what_is_written_is_read_bit_for_bit():
    """I03: ids are never text on the way; the first log-prob is one whose shortest float32 text rounds wrongly."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0x80000000, 0xFF800000, 1000, dtype=np.uint32)
    bits[0] = 0x95AE43FD
    ids = rng.integers(0, 2**40, 1000)
    branches = [
        Branch(ids, None, 0.1 + 0.2, bits.view(np.float32), finish_reason="length", rewards={"acc": 1 / 3}),
        Branch(ids[:5], loss_mask=[1, 1, 0, 0, 1], reward=None, finish_reason="stop"),
        Branch([], reward=-1e-300),
        Branch([4], reward=2.0, trajectory="t"),
    ]
    group = PromptGroup(ids[::2], branches, "g", "toy", {"answers": ["ä", 2**53 + 1]}, {"depth": np.arange(2)})
    read = read_back(group)
    np.testing.assert_array_equal(read.prompt_ids, group.prompt_ids)
    assert (read.group_id, read.data_source, read.ground_truth) == ("g", "toy", group.ground_truth)
    assert read.extra_info == {"depth": [0, 1]}
    np.testing.assert_array_equal(read.branches[0].rollout_logprobs.view(np.uint32), bits)
    for actual, expected in zip(read.branches, branches, strict=True):
        assert actual.response_ids.tobytes() == expected.response_ids.tobytes()
        assert actual.loss_mask.tobytes() == expected.loss_mask.tobytes()
        for name in ("reward", "rewards", "finish_reason", "trajectory"):
            assert getattr(actual, name) == getattr(expected, name)
        assert (actual.rollout_logprobs is None) == (expected.rollout_logprobs is None)


@pytest.mark.parametrize("group_id", [0, np.int64(7), "7", "ä\n"])
def test_group_ids_keep_their_kind(group_id):
    """They key random numbers, where 7 and "7" are different groups."""
    read = read_back(PromptGroup([1], [Branch([2], reward=1.0)], group_id))
    assert read.group_id == group_id and isinstance(read.group_id, (int, str))


def test_a_prompt_is_written_once_per_group():
    group = PromptGroup(np.full(1000, 123456), [Branch([1], reward=1.0) for _ in range(8)])
    text = format_group(0, group)
    assert text.count(b"123456") == 1000 and text.count(b"prompt_ids") == 1


@pytest.mark.parametrize("length", [4, 6])
def test_logprobs_of_another_length_are_refused_never_padded(length):
    """C06"""
    message = refused("need one per response token", response_logprobs=[-0.5] * length)
    assert "step 3, group 'g7', branch 1:" in message and f"{length} entries for a response of 5 tokens" in message
    assert branch_of(response_logprobs=None).rollout_logprobs is None
    assert branch_of().rollout_logprobs is None


def test_loss_mask_covers_the_response_only():
    """D11: accepted at response length; both lengths in the message otherwise."""
    assert branch_of(loss_mask=[1, 1, 0, 0, 1]).loss_mask.tolist() == [1, 1, 0, 0, 1]
    assert branch_of().loss_mask.tolist() == [1] * 5
    whole = "loss_mask has 12 entries for a response of 5 tokens, as many as prompt and response"
    refused(whole, prompt_ids=PROMPT, loss_mask=[1] * 12)
    refused("loss_mask has 4 entries for a response of 5 tokens;", loss_mask=[1] * 4)


def test_masks_of_a_masked_response_agree():
    """D07: a response cut short whose every token its producer masked."""
    masked = {"loss_mask": [0] * 5, "finish_reason": "length", "response_logprobs": [-0.5] * 5}
    group = group_of(masked, {"reward": 0.0})
    work = Work(PromptBatch([group]), advantages_of(PromptBatch([group]), AlgorithmConfig()))
    masks = work.loss_masks()
    assert not masks[0, 0].any() and masks[0, 1].sum() == 5
    totals = count(list(masks.values()))
    assert (totals.num_loss_tokens, totals.num_sequences) == (5, 1)
    branch = group.branches[0]
    assert rollout_mismatch([np.zeros(5)], [branch.rollout_logprobs], [branch.loss_mask]).means == {}


def test_an_empty_response_is_accepted_and_counts_nothing():
    """D08, A10"""
    empty = {"response_ids": [], "reward": 10.0, "response_logprobs": [], "loss_mask": []}
    group = group_of(empty, {}, {"reward": 0.0}, {})
    assert group.branches[0].num_tokens == 0
    advantages = advantages_of(PromptBatch([group]), AlgorithmConfig())
    assert (0, 0) not in advantages and sum(advantages.values()) == pytest.approx(0.0)
    metrics = rollout_metrics([group], report_of([group])).to_means()
    assert metrics["critic/score/mean"] == pytest.approx(2 / 3) and metrics["reward/empty"] == 1
    assert metrics["response_length/mean"] == 15 / 4


def test_forced_prefix_belongs_to_the_prompt_or_is_masked():
    """D12: 2 forced and 3 sampled tokens, either way 3 train."""
    forced, sampled = [1, 2], [3, 4, 5]
    in_prompt = branch_of(response_ids=sampled, response_logprobs=[-0.5] * 3)
    logprobs = [0, 0, -0.5, -0.5, -0.5]
    masked = branch_of(response_ids=forced + sampled, loss_mask=[0, 0, 1, 1, 1], response_logprobs=logprobs)
    assert in_prompt.loss_mask.sum() == masked.loss_mask.sum() == 3
    refused("3 entries for a response of 5 tokens", response_ids=forced + sampled, response_logprobs=[-0.5] * 3)


def test_the_digest_ties_a_response_to_its_prompt():
    """I10: 12 tokens sampled from, the last 8 trained on."""
    long = list(range(12))
    refused("sampled from another prompt", prompt_ids=long[-8:], prompt_digest=prompt_digest(long))
    with pytest.raises(RowError, match="branch 1: the prompt's digest is .* sampled from another prompt"):
        group_of({}, {"prompt_digest": prompt_digest(PROMPT[1:])})
    assert len(group_of({}, {"prompt_digest": None, "prompt_ids": PROMPT}).branches) == 2


@pytest.mark.parametrize("limits, words", [
    (Limits(max_prompt_length=6), "7 tokens; the limit is 6: shorten it or raise --max-prompt-length"),
    (Limits(max_response_length=4), "5 tokens; the limit is 4: shorten it or raise --max-response-length"),
    (Limits(vocab_size=11), "prompt_ids holds id 11 at position 6; ids must be in 0..10"),
    (Limits(vocab_size=12, max_prompt_length=7, max_response_length=5), None),
])  # fmt: skip
def test_limits(limits, words):
    row = row_of(prompt_ids=PROMPT)
    if words is None:
        parse_rollout_row(row, limits)
    else:
        with pytest.raises(RowError, match=words):
            parse_rollout_row(row, limits)


REFERENCE = {"file": "prompts.jsonl", "row": 3, "num_tokens": 7, "digest": prompt_digest(PROMPT)}


def test_a_prompt_reference():
    row = parse_rollout_row(row_of(prompt_ref=REFERENCE))
    assert (row.num_prompt_tokens, row.prompt_digest, row.prompt_ids) == (7, prompt_digest(PROMPT), None)
    by_id = {"file": "p", "id": "x1", "num_tokens": 7, "digest": "abc"}
    assert parse_rollout_row(row_of(prompt_ref=by_id, prompt_digest=None)).prompt_digest == "abc"


@pytest.mark.parametrize("change", [
    {"row": 0}, {"row": "3"}, {"num_tokens": 0}, {"num_tokens": 7.0}, {"digest": None}, {"digest": ""}, {"file": 3},
    {"offset": 3}, {"digest": "0" * 16},
])  # fmt: skip
def test_bad_prompt_references(change):
    refused("prompt_ref", prompt_ref=REFERENCE | change)


@pytest.mark.parametrize("key", ["file", "row", "num_tokens", "digest"])
def test_incomplete_prompt_references(key):
    refused("prompt_ref", prompt_ref={name: value for name, value in REFERENCE.items() if name != key})
    refused("prompt_ref is \\[\\]", prompt_ref=[])


def test_a_trajectory_in_several_rows_counts_once():
    """A15, N04: rewards 1 and 0 have mean 0.5, although three of the four rows say 1."""
    part, other = {"trajectory": "a"}, {"trajectory": "b", "reward": 0.0}
    group = group_of(part, part | {"response_ids": []}, part, other)
    advantages = advantages_of(PromptBatch([group]), NO_STD)
    assert advantages == {(0, 0): 0.5, (0, 2): 0.5, (0, 3): -0.5}
    metrics = rollout_metrics([group], report_of([group])).to_means()
    assert metrics["critic/score/mean"] == 0.5 and metrics["frac_reward_zero_std"] == 0
    with pytest.raises(RowError, match="branch 1: reward is 0.0, in the first row of trajectory 'a' 1.0"):
        group_of({"trajectory": "a"}, {"trajectory": "a", "reward": 0.0})


def test_a_multi_turn_response_is_one_row():
    """A15, D12: three turns with tool output between them; as rows of one branch they are refused."""
    whole = group_of({"response_ids": list(range(9)), "loss_mask": [1, 1, 0, 0, 1, 1, 0, 0, 1]}, {"reward": 0.0})
    assert whole.branches[0].loss_mask.sum() == 5
    assert list(advantages_of(PromptBatch([whole]), NO_STD).values()) == [0.5, -0.5]
    with pytest.raises(RowError, match="has a row of branch 0 already"):
        group_of({}, {"branch": 0}, {"branch": 0}, {"branch": 1})


def test_mismatch_is_over_the_tokens_that_the_policy_wrote():
    """N05: masked places hold 0 in the file."""
    policy, rollout, mask = [-1.0, -2.0, -9.0, -9.0, -0.5], [-1.5, -2.0, 0.0, 0.0, -0.25], [1, 1, 0, 0, 1]
    metrics = rollout_mismatch([policy], [rollout], [mask])
    differences = [np.exp(-1.0) - np.exp(-1.5), 0.0, np.exp(-0.25) - np.exp(-0.5)]
    assert metrics.means["training/rollout_probs_diff_mean"] == (pytest.approx(sum(differences)), 3.0)
    assert metrics.maxima["training/rollout_probs_diff_max"] == pytest.approx(max(differences))
    assert metrics.to_means()["rollout_corr/kl"] == pytest.approx((-0.5 + 0 + 0.25) / 3)


def test_after_a_bad_row_the_next_are_judged_by_themselves():
    order = GroupOrder()
    order.skip(row_of(branch=0, prompt_ids=PROMPT, reward="x"))
    assert not order.follow(parse_rollout_row(row_of(branch=1)))
    with pytest.raises(RowError, match="comes after rows of step 3; need rows in the order of their steps"):
        order.follow(parse_rollout_row(row_of(step=2)))
    assert not order.follow(parse_rollout_row(row_of(branch=2)))
