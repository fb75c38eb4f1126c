"""Branches as micro-batch rows: which inputs, which labels, which row belongs to whom.

Two properties are checked throughout. A branch's inputs are its boundary token and all its tokens but the last, its
labels are its tokens: nothing is rolled, so no label can come from a neighbour. And ids are data: no id means
padding or end.
"""
import numpy as np
import pytest
import torch

from megatron_longstraw.context_parallel.layout import slice_sequence
from megatron_longstraw.mcore.packing import (
    PromptBatch,
    batch_prompts,
    branch_ids,
    local_rows,
    pack_branches,
    pack_values,
)
from megatron_longstraw.types import Branch, PromptGroup


def group(prompt, *responses, group_id=0):
    return PromptGroup(prompt, [Branch(response) for response in responses], group_id=group_id)


def all_rows(batch, branches_per_microbatch):
    """{(prompt, branch): (inputs, labels)} with the pads cut off, over all micro-batches; no place twice."""
    rows = {}
    for pack in pack_branches(batch, branches_per_microbatch):
        inputs, labels = branch_ids(batch, pack)
        for row, place in enumerate(pack.rows):
            if place is None:
                assert not inputs[row].any()
                assert not labels[row].any()
                continue
            assert place not in rows
            length = batch.groups[place[0]].branches[place[1]].num_tokens
            assert not inputs[row, length:].any()
            assert not labels[row, length:].any()
            rows[place] = inputs[row, :length].tolist(), labels[row, :length].tolist()
    return rows


def expected_rows(batch):
    """From full sequences: position i of prompt + response predicts token i + 1."""
    rows = {}
    for prompt, own in enumerate(batch.groups):
        for index, branch in enumerate(own.branches):
            sequence = [*own.prompt_ids.tolist(), *branch.response_ids.tolist()]
            scored = range(own.num_prompt_tokens - 1, len(sequence) - 1)
            if branch.num_tokens:
                rows[prompt, index] = [sequence[i] for i in scored], [sequence[i + 1] for i in scored]
    return rows


def random_batch(seed, num_prompts, lengths):
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(num_prompts):
        branches = [Branch(rng.integers(1, 99, length)) for length in rng.permutation(lengths)]
        groups.append(PromptGroup(rng.integers(1, 99, 5), branches, group_id=number))
    return PromptBatch(groups)


@pytest.mark.parametrize("branches_per_microbatch", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("num_prompts", "lengths"), [(1, [4]), (1, [3, 5, 1]), (2, [7, 0, 1, 2, 7]), (3, [0, 2, 9, 4])]
)
def test_rows_are_those_of_full_sequences(branches_per_microbatch, num_prompts, lengths):
    """Every non-empty branch once, wherever it is packed, with the inputs and labels of its own full sequence (F07:
    odd lengths never reach into a neighbour)."""
    batch = random_batch(1, num_prompts, lengths)
    assert all_rows(batch, branches_per_microbatch) == expected_rows(batch)


def test_first_label_is_each_branch_s_own():
    """F16: one prompt position has a different target per branch; rolled ids would give all of them one."""
    batch = PromptBatch([group([1, 2, 3], [7, 5], [9, 5])])
    (pack,) = pack_branches(batch, 4)
    inputs, labels = branch_ids(batch, pack)
    assert inputs.tolist() == [[3, 7], [3, 9]]
    assert labels.tolist() == [[7, 5], [9, 5]]


def test_shared_first_tokens_stay_response_tokens():
    """F22: the boundary comes from the prompt's length, not from comparing rows: 3 + 2 tokens keep their labels."""
    batch = PromptBatch([group([1, 2, 3, 4, 5, 6], [4, 4, 9], [4, 4])])
    assert batch.num_prefix_tokens == 5
    assert all_rows(batch, 2) == {(0, 0): ([6, 4, 4], [4, 4, 9]), (0, 1): ([6, 4], [4, 4])}


def test_one_branch_does_not_change_another():
    """F17: altering a branch alters its own row only, whatever the order of the branches."""
    before = all_rows(PromptBatch([group([1, 2], [3, 4, 5], [6, 7, 8, 9])]), 2)
    after = all_rows(PromptBatch([group([1, 2], [30, 40, 50, 60, 70], [6, 7, 8, 9])]), 2)
    swapped = all_rows(PromptBatch([group([1, 2], [6, 7, 8, 9], [3, 4, 5])]), 2)
    assert after[0, 1] == before[0, 1] == swapped[0, 0]
    assert swapped[0, 1] == before[0, 0]


def test_ids_that_mean_padding_or_end_survive():
    """D02, D03, D04: pad id, several end ids and the id 0 are ordinary tokens; a sampled end is trained."""
    ends = [128001, 128008, 128009]
    batch = PromptBatch([group([2, 0, 2, 2], [5, 6, 2], [0, 0], ends, [2, 2, 2, 0])])
    assert batch.prefix_ids().tolist() == [[2, 0, 2]]
    rows = all_rows(batch, 3)
    assert rows[0, 0] == ([2, 5, 6], [5, 6, 2])
    assert rows[0, 1] == ([2, 0], [0, 0])
    assert rows[0, 2] == ([2, 128001, 128008], ends)
    assert rows[0, 3] == ([2, 2, 2, 2], [2, 2, 2, 0])


def test_branches_come_by_falling_length():
    """Rows are padded to the longest of their micro-batch: unsorted, pads cost more than the tokens."""
    batch = PromptBatch([group([1, 2], [3] * 2, [3] * 9, [3] * 1, [3] * 8)])
    packs = pack_branches(batch, 2)
    assert [pack.rows for pack in packs] == [((0, 1), (0, 3)), ((0, 0), (0, 2))]
    assert [pack.num_tokens for pack in packs] == [9, 2]


def test_equal_lengths_keep_their_order():
    """Score and replay pack separately: an unstable order would break the bit-equality of their log-probs."""
    batch = PromptBatch([group([1, 2], *([[3, 4]] * 5))])
    assert [row for pack in pack_branches(batch, 2) for row in pack.rows] == [(0, i) for i in range(5)]


def test_empty_branches_are_left_out():
    """D08: an empty response has no label; a group of nothing else has no micro-batch at all."""
    batch = PromptBatch([group([1, 2], [], [3], [], [4, 5])])
    (pack,) = pack_branches(batch, 4)
    assert pack.rows == ((0, 3), (0, 1))
    assert pack_branches(PromptBatch([group([1, 2], [], [])]), 4) == []
    assert pack_branches(PromptBatch([group([1, 2])]), 4) == []


@pytest.mark.parametrize("branches_per_microbatch", [1, 2, 3])
def test_rows_are_prompt_major_with_fillers(branches_per_microbatch):
    """Attention takes row i to belong to prompt i // (rows / prompts): prompts with fewer branches need fillers, or
    the rows after them attend to the wrong prefix."""
    batch = PromptBatch([group([1, 2], [3], [3, 3], [3] * 3), group([4, 5], [6]), group([7, 8], [9], [])])
    for pack in pack_branches(batch, branches_per_microbatch):
        width, remainder = divmod(len(pack.rows), 3)
        assert remainder == 0
        assert 1 <= width <= branches_per_microbatch
        for row, place in enumerate(pack.rows):
            assert place is None or place[0] == row // width
        lengths = [batch.groups[p].branches[b].num_tokens for p, b in filter(None, pack.rows)]
        assert pack.num_tokens == max(lengths)


def test_values_sit_where_their_tokens_sit():
    """Weights next to the wrong labels train the wrong tokens; on pads and fillers they would train noise."""
    batch = random_batch(2, 2, [5, 1, 3])
    batch.groups[1].branches.pop()
    values = {
        (prompt, index): 100 * branch.response_ids
        for prompt, own in enumerate(batch.groups)
        for index, branch in enumerate(own.branches)
    }
    for pack in pack_branches(batch, 2):
        _, labels = branch_ids(batch, pack)
        table = pack_values(pack, values)
        assert table.dtype == np.float32
        assert np.array_equal(table, 100 * labels)


# -- prompts ---------------------------------------------------------------------------------------------------


def test_prompts_of_one_length_share_a_batch():
    """Prompts of a batch share one chunk plan: another length in it would be cut or padded with foreign tokens."""
    groups = [group([1] * n, [2], group_id=i) for i, n in enumerate([4, 6, 4, 4, 6, 1])]
    batches = batch_prompts(groups, 2)
    assert [[g.group_id for g in batch.groups] for batch in batches] == [[0, 2], [3], [1, 4], [5]]
    assert [batch.num_prefix_tokens for batch in batches] == [3, 3, 5, 0]
    assert [len(batch.groups) for batch in batch_prompts(groups, 1)] == [1] * 6


def test_unequal_prompts_in_one_batch_are_refused():
    """np.stack would fail later with a message about shapes."""
    with pytest.raises(AssertionError, match=r"equally long, got \[2, 3\]"):
        PromptBatch([group([1, 2]), group([1, 2, 3])])


def test_prefix_and_boundary_are_the_prompt():
    """The store holds P - 1 tokens; the last prompt token is every branch's first input, exactly once."""
    batch = PromptBatch([group([1, 2, 3]), group([4, 5, 6])])
    assert batch.prefix_ids().tolist() == [[1, 2], [4, 5]]
    assert batch.boundary_ids().tolist() == [3, 6]
    one_token = PromptBatch([group([8], [9])])
    assert one_token.prefix_ids().shape == (1, 0)
    assert all_rows(one_token, 1) == {(0, 0): ([8], [9])}


@pytest.mark.parametrize("prompt", [[], np.zeros(0, dtype=np.int64)])
def test_empty_prompt_is_refused_by_name(prompt):
    """There is no boundary token to start a branch from; the message must lead to the row of the data."""
    with pytest.raises(ValueError, match="prompt of group 'doc-7' is empty"):
        PromptGroup(prompt, group_id="doc-7")


@pytest.mark.parametrize("ids", [[[1, 2]], [1.0, 2.0], ["a"], 3])
def test_ids_are_flat_lists_of_integers(ids):
    """A float id or a batch of rows would be reinterpreted silently."""
    with pytest.raises(ValueError, match="flat list of integers"):
        Branch(ids)


# -- responses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 9, 0])
def test_loss_mask_covers_the_response_only(length):
    """D11: a mask over prompt + response, or one entry short, is refused with both lengths."""
    assert Branch([5, 6, 7, 8], loss_mask=[1, 0, 1, 1]).loss_mask.tolist() == [1, 0, 1, 1]
    with pytest.raises(ValueError, match=f"loss_mask has {length} entries for a response of 4 tokens"):
        Branch([5, 6, 7, 8], loss_mask=[1.0] * length)


@pytest.mark.parametrize("length", [4, 6])
def test_rollout_logprobs_are_never_padded(length):
    """C06: a missing log-prob filled with 0.0 claims probability 1."""
    assert Branch([1] * 5, rollout_logprobs=[-0.5] * 5).rollout_logprobs.dtype == np.float32
    with pytest.raises(ValueError, match=f"rollout_logprobs has {length} entries for a response of 5 tokens"):
        Branch([1] * 5, rollout_logprobs=[-0.5] * length)


def test_mask_defaults_to_every_response_token():
    """D04: the sampled end is one of three loss tokens; an empty response has none."""
    assert Branch([5, 6, 2]).loss_mask.tolist() == [1, 1, 1]
    assert Branch([]).loss_mask.shape == (0,)


# -- rows of one rank ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 13])
@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_local_rows_of_all_ranks_are_the_rows(cp_size, length, dtype):
    """Labels and weights are cut like the inputs; the ranks' columns side by side are the whole, then zeros."""
    values = np.arange(1, 2 * length + 1).reshape(2, length).astype(dtype)
    parts = [
        local_rows(values, slice_sequence(50, length, cp_rank=rank, cp_size=cp_size, multiple=2), torch.device("cpu"))
        for rank in range(cp_size)
    ]
    assert len({part.shape for part in parts}) == 1
    together = torch.cat(parts, dim=1).numpy()
    assert together.dtype == dtype
    assert np.array_equal(together[:, :length], values)
    assert not together[:, length:].any()
