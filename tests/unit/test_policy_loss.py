"""Token weights against autograd of a textbook loss, clip cases, and metrics that merge over ranks."""
import math

import numpy as np
import pytest
import torch

from megatron_longstraw.objectives.aggregation import Totals, count
from megatron_longstraw.objectives.metrics import MetricSums
from megatron_longstraw.objectives.policy_loss import PolicyObjective

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]

pytestmark = pytest.mark.filterwarnings("error")


def textbook(policy, old, advantages, masks, mode, low, high):
    """(loss, gradient per branch): padded table, case distinction instead of max, float64 autograd."""
    width = max(len(m) for m in masks)

    def pad(rows):
        return torch.tensor([list(map(float, r)) + [0.0] * (width - len(r)) for r in rows], dtype=torch.float64)

    logp, mask, adv = pad(policy).requires_grad_(), pad(masks), torch.tensor(advantages, dtype=torch.float64)[:, None]
    ratio = torch.exp(logp - pad(old))
    stays = torch.where(adv > 0, ratio <= 1 + high, ratio >= 1 - low)
    bound = torch.where(adv > 0, torch.full_like(adv, 1 + high), torch.full_like(adv, 1 - low))
    per_token = -adv * torch.where(stays, ratio, bound.expand_as(ratio)) * mask
    lengths = mask.sum(1)
    if mode == "token-mean":
        loss = per_token.sum() / lengths.sum()
    else:
        rows = [per_token[i].sum() / (lengths[i] if mode == "seq-mean-token-mean" else 1.0)
                for i in range(len(masks)) if lengths[i] > 0]
        loss = sum(rows) / len(rows)
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.item(), [g[: len(m)].numpy() for g, m in zip(gradient, masks)]


def table(seed=0):
    """Branches with holes in their masks, an empty one, a fully masked one; ratios from 0.4 to 2.5."""
    rng = np.random.default_rng(seed)
    masks = [(rng.random(n) < 0.8).astype(np.float32) for n in (5, 9, 1, 7, 6)] + [np.zeros(0), np.zeros(4)]
    masks[2][:] = 1
    old = [(-rng.exponential(size=len(m))).astype(np.float32) for m in masks]
    policy = [(o + rng.normal(scale=0.4, size=len(o))).astype(np.float32) for o in old]
    return policy, old, [1.2, -0.7, 0.0, -1.5, 0.6, 0.9, 2.0], masks


def evaluate(objective, policy, old, advantages, masks, totals=None):
    return objective.evaluate(policy, old, advantages, objective.scale(masks, totals or count(masks)))


@pytest.mark.parametrize("mode", MODES)
def test_weights_and_loss_equal_autograd_of_the_textbook_loss(mode):
    policy, old, advantages, masks = table()
    got = evaluate(PolicyObjective(0.2, 0.28, mode), policy, old, advantages, masks)
    loss, gradient = textbook(policy, old, advantages, masks, mode, 0.2, 0.28)
    assert got.is_finite and got.loss == pytest.approx(loss, abs=1e-12)
    for w, g, p in zip(got.weights, gradient, policy):
        assert w.dtype == np.float32 and w.shape == p.shape
        np.testing.assert_allclose(w, g, rtol=1e-6, atol=1e-9)
    assert got.metrics.to_means()["actor/pg_clipfrac"] > 0, "the table must contain clipped tokens"


@pytest.mark.parametrize("mode", MODES)
def test_first_update_is_the_surrogate_at_ratio_one(mode):
    policy, _, advantages, masks = table()
    objective = PolicyObjective(0.2, 0.2, mode)
    scale = objective.scale(masks, count(masks))
    weights = objective.weights_first_update(scale, advantages, masks)
    _, gradient = textbook(policy, policy, advantages, masks, mode, 0.2, 0.2)
    for same in (policy, [np.zeros(len(m)) for m in masks]):
        got = objective.evaluate(same, same, advantages, scale)
        means = got.metrics.to_means()
        assert (means["actor/ratio_mean"], means["actor/ratio_max"], means["actor/pg_clipfrac"]) == (1.0, 1.0, 0.0)
        for w, e, g in zip(weights, got.weights, gradient):
            assert w.dtype == np.float32
            np.testing.assert_array_equal(w, e)
            np.testing.assert_allclose(w, g, rtol=1e-6, atol=1e-9)


def test_first_update_is_never_clipped():
    """Clip bounds of zero width still include ratio 1."""
    objective = PolicyObjective(0.0, 0.0)
    masks = [np.ones(2)]
    assert objective.weights_first_update([np.array([0.5, 0.5])], [2.0], masks)[0].tolist() == [-1.0, -1.0]
    same = [np.array([-1.0, -2.0])]
    assert evaluate(objective, same, same, [2.0], masks).weights[0].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("parts", [[[0, 1, 2], [3, 4, 5, 6]], [[6], [4, 0], [], [5, 1], [3, 2]]])
def test_any_split_over_groups_and_ranks(mode, parts):
    """Same weights to the bit, same loss, same metrics; local denominators or means of means would differ."""
    policy, old, advantages, masks = table()
    objective = PolicyObjective(0.2, 0.28, mode)
    whole = evaluate(objective, policy, old, advantages, masks)
    totals = sum((count([masks[i] for i in part]) for part in parts), Totals())
    loss, metrics = 0.0, MetricSums()
    for part in parts:
        pick = [[x[i] for i in part] for x in (policy, old, advantages, masks)]
        got = evaluate(objective, *pick, totals=totals)
        first = objective.weights_first_update(objective.scale(pick[3], totals), pick[2], pick[3])
        whole_first = objective.weights_first_update(objective.scale(masks, totals), advantages, masks)
        for j, i in enumerate(part):
            np.testing.assert_array_equal(got.weights[j], whole.weights[i])
            np.testing.assert_array_equal(first[j], whole_first[i])
        loss, metrics = loss + got.loss, metrics + got.metrics
    assert loss == pytest.approx(whole.loss, abs=1e-14)
    assert metrics.to_means() == pytest.approx(whole.metrics.to_means(), abs=1e-12)


def one_token(log_ratio, advantage, low=0.2, high=0.28):
    return evaluate(PolicyObjective(low, high), [[log_ratio - 1.0]], [[-1.0]], [advantage], [np.ones(1)])


def test_clip_higher():
    """0.28 is an offset: 1.25 is inside, 1.3 is clipped to 1.28 and has no gradient."""
    inside, outside = one_token(math.log(1.25), 1.0), one_token(math.log(1.3), 1.0)
    assert inside.loss == pytest.approx(-1.25) and inside.weights[0] == pytest.approx([-1.25])
    assert outside.loss == pytest.approx(-1.28) and outside.weights[0].tolist() == [0.0]
    fractions = [x.metrics.to_means()["actor/pg_clipfrac"] for x in (inside, outside)]
    assert fractions == [0.0, 1.0]


@pytest.mark.parametrize(
    "ratio, advantage, loss, weight",
    [
        (0.7, -1.0, 0.8, 0.0),  # pushed down far enough already
        (0.7, 1.0, -0.7, -0.7),  # pessimistic: the bound must not hide a bad move (min instead of max would)
        (1.5, -1.0, 1.5, 1.5),
        (0.85, -1.0, 0.85, 0.85),  # inside the low bound
        (0.75, -1.0, 0.8, 0.0),  # outside it; swapped bounds (0.28 below) would not clip
    ],
)
def test_pessimistic_side_keeps_its_gradient(ratio, advantage, loss, weight):
    got = one_token(math.log(ratio), advantage)
    assert got.loss == pytest.approx(loss) and got.weights[0] == pytest.approx([weight])
    # Counted as clipped exactly when the gradient is cut, not whenever the ratio is out of range.
    assert got.metrics.to_means()["actor/pg_clipfrac"] == float(weight == 0.0)


@pytest.mark.parametrize("name, value", [("clip_ratio_high", 1.28), ("clip_ratio_low", 1.0), ("clip_ratio_low", -0.1)])
def test_absolute_bounds_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{value}.*--{name.replace('_', '-')}"):
        PolicyObjective(**{name: value})


def test_unknown_aggregation_is_refused_at_construction():
    with pytest.raises(ValueError, match="--loss-agg-mode"):
        PolicyObjective(loss_agg_mode="token_mean")


@pytest.mark.parametrize("garbage", [9.0, -900.0, float("nan"), float("inf"), -float("inf")])
def test_untrained_positions_are_never_read(garbage):
    """Multiplying by the mask instead of selecting turns 0 * inf into NaN."""
    objective = PolicyObjective()
    masks = [np.array([1, 1, 0, 0, 1.0]), np.zeros(2)]
    policy, old = [np.full(5, -1.0), np.full(2, -1.0)], [np.full(5, -1.1), np.full(2, -1.0)]
    clean = evaluate(objective, policy, old, [1.0, -1.0], masks)
    for side in (policy, old):
        side[0][2:4] = garbage
        side[1][:] = garbage
    # A branch without loss tokens may have no usable advantage either.
    got = evaluate(objective, policy, old, [1.0, garbage], masks)
    assert got.is_finite and got.loss == clean.loss and got.metrics == clean.metrics
    assert [w.tobytes() for w in got.weights] == [w.tobytes() for w in clean.weights]
    assert not got.weights[0][2:4].any() and not got.weights[1].any()
    assert got.metrics.means["actor/ratio_mean"][1] == 3.0, "counts are those of the loss tokens"
    first = objective.weights_first_update(objective.scale(masks, count(masks)), [1.0, garbage], masks)
    assert not first[1].any() and not first[0][2:4].any()


def test_masked_truncated_response_is_not_in_the_loss():
    masks = [np.ones(4), np.zeros(12)]
    tables = [np.full(4, -1.0), np.full(12, -1.0)]
    assert evaluate(PolicyObjective(), tables, tables, [-1.0, -1.0], masks).loss == pytest.approx(1.0)


@pytest.mark.parametrize("masks", [[], [np.zeros(3), np.zeros(0)]])
def test_step_without_signal_is_finite_zero(masks):
    tables = [np.full(len(m), -1.0) for m in masks]
    got = evaluate(PolicyObjective(), tables, tables, [1.0] * len(masks), masks)
    assert got.is_finite and got.loss == 0.0 and len(got.weights) == len(masks)
    assert not any(w.any() for w in got.weights)
    assert set(got.metrics.to_means().values()) == {0.0}


@pytest.mark.parametrize("log_ratio", [5.0, 20.0, 88.8, 300.0, 2000.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_large_ratios_stay_finite(log_ratio, advantage):
    """exp(88.8) is inf in float32 and exp(2000) in float64; cut at 20, with zero gradient beyond."""
    got = one_token(log_ratio, advantage)
    assert got.is_finite and all(np.isfinite(v) for v in got.metrics.to_means().values())
    assert abs(got.loss) <= math.exp(20) * (1 + 1e-9)
    if advantage < 0:
        assert got.loss == pytest.approx(math.exp(min(log_ratio, 20.0)))
        assert got.weights[0] == pytest.approx([math.exp(log_ratio) if log_ratio <= 20 else 0.0], rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["policy", "old", "advantage"])
@pytest.mark.filterwarnings("default")
def test_values_that_are_not_finite_are_reported_not_raised(bad, where):
    """The clamp makes the weight of an infinite log-prob finite, so looking at weights alone misses it."""
    values = {"policy": -1.0, "old": -1.0, "advantage": 1.0, where: bad}
    got = evaluate(
        PolicyObjective(), [[values["policy"], -1.0]], [[values["old"], -1.0]], [values["advantage"]], [np.ones(2)]
    )
    assert not got.is_finite


def test_missing_log_probs_are_refused_not_padded():
    for wrong in (4, 6):
        with pytest.raises(ValueError, match=f"old_logprobs of branch 1 has {wrong} entries .* of 5 tokens"):
            evaluate(PolicyObjective(), [np.zeros(2), np.zeros(5)], [np.zeros(2), np.zeros(wrong)], [1.0, 1.0],
                     [np.ones(2), np.ones(5)])
    with pytest.raises(ValueError, match="got 1 advantages for 2 branches"):
        PolicyObjective().weights_first_update([np.ones(1)] * 2, [1.0], [np.ones(1)] * 2)


def test_works_inside_no_grad_and_leaves_the_caller_table_alone():
    policy = torch.full((3,), -1.0)
    with torch.no_grad():
        got = evaluate(PolicyObjective(), [policy], [np.full(3, -1.0)], [1.0], [np.ones(3)])
    assert got.weights[0] == pytest.approx([-1 / 3] * 3) and not policy.requires_grad


def test_metric_values_of_a_small_table():
    """KL is mean(old - policy) over loss tokens; its sign is easily lost."""
    got = evaluate(PolicyObjective(), [[-1.0, -1.2, -9.0]], [[-1.1, -1.0, 0.0]], [1.0], [np.array([1, 1, 0.0])])
    means = got.metrics.to_means()
    assert means["actor/ppo_kl"] == pytest.approx((-0.1 + 0.2) / 2)
    assert means["actor/ratio_mean"] == pytest.approx((math.exp(0.1) + math.exp(-0.2)) / 2)
    assert means["actor/ratio_max"] == pytest.approx(math.exp(0.1))
    assert means["actor/pg_loss"] == got.loss


def clip_fraction(num_clipped, num_tokens):
    ratios = [2.0] * num_clipped + [1.0] * (num_tokens - num_clipped)
    return evaluate(PolicyObjective(), [np.log(ratios)], [np.zeros(num_tokens)], [1.0], [np.ones(num_tokens)]).metrics


def test_clip_fraction_over_ranks_is_not_a_mean_of_means():
    """3 of 12 and 3 of 4: 6/16 = 0.375, where the mean of means says 0.5."""
    merged = clip_fraction(3, 12) + clip_fraction(3, 4)
    assert merged.to_means()["actor/pg_clipfrac"] == 0.375


def test_metrics_through_an_all_reduce():
    """Sums added, maxima maximised; a rank without branches takes part with the same layout."""
    ranks = [clip_fraction(3, 12), clip_fraction(0, 4), evaluate(PolicyObjective(), [], [], [], []).metrics]
    sums, maxima = zip(*(r.to_vector() for r in ranks))
    assert {x.dtype for x in (*sums, *maxima)} == {np.dtype(np.float64)}
    for rank in ranks:
        reduced = rank.from_vector(np.sum(sums, axis=0), np.max(maxima, axis=0))
        assert reduced == ranks[0] + ranks[1] + ranks[2]
        assert reduced.to_means()["actor/pg_clipfrac"] == 3 / 16 and reduced.to_means()["actor/ratio_max"] == 2.0
        assert rank.from_vector(*rank.to_vector()) == rank


def test_metrics_merge_by_kind_whatever_the_order_of_names():
    a = MetricSums({"z": (1.0, 2.0), "a": (5.0, 1.0)}, {"t": 1.5}, {"m": 3.0})
    b = MetricSums({"a": (1.0, 1.0), "z": (3.0, 2.0)}, {"t": 2.0}, {"m": 1.0})
    assert (a + b).to_means() == {"z": 1.0, "a": 3.0, "t": 3.5, "m": 3.0}
    assert a.from_vector(a.to_vector()[0] + b.to_vector()[0], np.maximum(a.to_vector()[1], b.to_vector()[1])) == a + b
    assert (a + MetricSums(means={"new": (1.0, 1.0)})).means["new"] == (1.0, 1.0)
    for left, right in ((a, MetricSums(maxima={"m": float("nan")})), (MetricSums(maxima={"m": float("nan")}), a)):
        assert math.isnan((left + right).to_means()["m"]), "a NaN must not vanish in a maximum"
    with pytest.raises(AssertionError, match="two kinds"):
        a + MetricSums(totals={"m": 1.0})
    with pytest.raises(AssertionError, match="different metrics"):
        a.from_vector(np.zeros(3), np.zeros(1))
