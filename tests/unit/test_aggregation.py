"""Token factors: loss = sum(c * token_loss) equals the textbook aggregation, whatever the split."""
import numpy as np
import pytest

from megatron_longstraw.objectives.aggregation import LOSS_AGG_MODES, Totals, count, token_scale
from megatron_longstraw.types import Branch

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


def textbook(token_losses, masks, mode):
    """Plain loops over one table that holds everything."""
    sums = [sum(float(x) * float(m) for x, m in zip(xs, ms)) for xs, ms in zip(token_losses, masks)]
    lengths = [float(np.sum(ms)) for ms in masks]
    if mode == "token-mean":
        return sum(sums) / sum(lengths)
    rows = [(s, n) for s, n in zip(sums, lengths) if n > 0]
    return sum(s if mode == "seq-mean-token-sum" else s / n for s, n in rows) / len(rows)


def aggregate(token_losses, masks, mode, totals):
    scales = token_scale(masks, mode, totals)
    return sum(float((c * np.asarray(x, dtype=np.float64)).sum()) for c, x in zip(scales, token_losses))


def ones(*lengths):
    return [np.ones(n, dtype=np.float32) for n in lengths]


def table(seed=0):
    """Branches of 1 to 9 tokens, with holes, an empty one and a fully masked one."""
    rng = np.random.default_rng(seed)
    masks = [(rng.random(n) < 0.7).astype(np.float32) for n in (5, 9, 3, 7, 1, 6)]
    masks[4][:] = 1
    masks += [np.zeros(0, np.float32), np.zeros(4, np.float32)]
    return [rng.normal(size=len(m)) for m in masks], masks


def test_modes_are_these():
    assert sorted(LOSS_AGG_MODES) == sorted(MODES)


@pytest.mark.parametrize("mode", MODES)
def test_equals_the_textbook(mode):
    losses, masks = table()
    scales = token_scale(masks, mode, count(masks))
    assert [c.dtype for c in scales] == [np.float64] * len(masks)
    assert [c.shape for c in scales] == [m.shape for m in masks]
    assert aggregate(losses, masks, mode, count(masks)) == pytest.approx(textbook(losses, masks, mode), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[7], [5, 0], [], [1, 6, 2], [4, 3]]])
def test_any_split_over_groups_and_ranks_gives_the_same_factors(mode, order):
    """Local denominators would change every factor."""
    _, masks = table()
    totals = sum((count([masks[i] for i in part]) for part in order), Totals())
    assert totals == count(masks)
    whole = token_scale(masks, mode, totals)
    for part in order:
        for i, c in zip(part, token_scale([masks[i] for i in part], mode, totals)):
            np.testing.assert_array_equal(c, whole[i])


def test_token_mean_over_micro_batches():
    """Mean of micro-batch means would be 3.0."""
    micro_batches = [([[1.0] * 2], ones(2)), ([[5.0] * 6], ones(6))]
    totals = count(ones(2)) + count(ones(6))
    assert sum(aggregate(x, m, "token-mean", totals) for x, m in micro_batches) == pytest.approx(4.0)


def test_ranks_with_unequal_token_counts():
    """Rank 0: 10 tokens of gradient 1, rank 1: 90 of gradient 0. Local means averaged would be 0.5."""
    ranks = [(ones(4, 6), 1.0), (ones(40, 50), 0.0)]
    totals = count(ranks[0][0]) + count(ranks[1][0])
    summed = sum(c.sum() * gradient for masks, gradient in ranks for c in token_scale(masks, "token-mean", totals))
    assert summed == pytest.approx(0.1)


def test_micro_batches_of_1_3_and_12_tokens():
    """Dividing by each micro-batch's tokens and by the number of micro-batches gives another number."""
    losses = [[16.0], [1.0] * 3, [2.0] * 12]
    totals = Totals(16.0, 3.0)
    got = sum(aggregate([x], ones(len(x)), "token-mean", totals) for x in losses)
    assert got == pytest.approx((16 + 3 + 24) / 16)


def test_sequence_means_are_per_branch():
    """As one packed row: 20/6; padding rows as sequences: 3.0."""
    losses, masks = [[10.0], [2.0] * 5, [9.0] * 3, []], ones(1, 5) + [np.zeros(3), np.zeros(0)]
    assert aggregate(losses, masks, "seq-mean-token-mean", count(masks)) == pytest.approx(6.0)
    assert aggregate(losses, masks, "seq-mean-token-sum", count(masks)) == pytest.approx(10.0)


def test_masked_truncated_response_leaves_the_denominator():
    """Kept in the denominator the loss would be 0.25."""
    masks = [np.ones(4), np.zeros(12)]
    assert aggregate([[1.0] * 4, [1.0] * 12], masks, "token-mean", count(masks)) == pytest.approx(1.0)
    assert sum(len(m) for m in masks) == 16


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("error")
def test_step_without_loss_tokens_is_zero_not_nan(mode):
    masks = [np.zeros(4), np.zeros(12), np.zeros(0)]
    totals = count(masks)
    assert totals == Totals(0.0, 0.0)
    scales = token_scale(masks, mode, totals)
    assert [c.tolist() for c in scales] == [[0.0] * 4, [0.0] * 12, []]
    assert token_scale([], mode, Totals()) == []


def test_branch_without_loss_tokens_counts_zero():
    """Clamped to one token the denominator would be 7; cut over two context-parallel ranks it is still 6."""
    assert count([np.ones(4), np.zeros(3), np.ones(2)]) == Totals(6.0, 2.0)
    slices = [[np.ones(2), np.zeros(2), np.ones(1)], [np.ones(2), np.zeros(1), np.ones(1)]]
    assert sum(count(part).num_loss_tokens for part in slices) == 6.0


def test_sampled_end_token_is_trained_also_when_it_is_the_pad_id():
    """Masks come from lengths: an id equal to the pad id (2) is a token like any other."""
    branch = Branch(response_ids=[5, 6, 2])
    (c,) = token_scale([branch.loss_mask], "token-mean", count([branch.loss_mask]))
    assert c == pytest.approx([1 / 3] * 3)


def test_response_prefix_the_policy_did_not_write_weighs_nothing():
    branch = Branch(response_ids=[7, 8, 9, 4], loss_mask=[0, 0, 1, 1])
    for mode in MODES:
        (c,) = token_scale([branch.loss_mask], mode, count([branch.loss_mask]))
        assert c[:2].tolist() == [0.0, 0.0] and c[2] > 0


def test_unknown_mode_and_partial_totals_are_refused():
    with pytest.raises(ValueError, match="'mean'.*token-mean.*--loss-agg-mode"):
        token_scale(ones(2), "mean", Totals(2.0, 1.0))
    with pytest.raises(ValueError, match="whole step"):
        token_scale(ones(3, 4), "token-mean", count(ones(3)))
