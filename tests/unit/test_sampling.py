"""Keyed random numbers and inverse-CDF sampling, against small hand-made distributions."""
import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from megatron_longstraw.rollout.sampling import keyed_uniform, sample

ALMOST_ONE = 1.0 - 2.0**-53


def uniforms(*values):
    return torch.tensor(values, dtype=torch.float64)


def draw(logits, u, temperature=1.0, top_p=1.0):
    """One distribution, many random numbers."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    return sample(logits.expand(len(u), -1), u, temperature, top_p)


def test_uniform_is_pinned():
    """A resumed run must draw what the first run drew: any change of the encoding shows here."""
    assert keyed_uniform(0, 0, 0, 0, 0) == 0.18160344008475482
    assert keyed_uniform(1234, 7, "doc-3", 2, 511) == 0.10021190656531753


def test_uniform_keeps_its_fields_apart():
    """Concatenated digits, or str(group_id), would make some of these equal."""
    keys = [(1, 23, 4, 5, 6), (12, 3, 4, 5, 6), (1, 2, 34, 5, 6), (1, 23, "4", 5, 6), (1, 23, "4, 5", 6, 0),
            (1, 23, '4", 5', 6, 0), (23, 1, 4, 5, 6), (1, 23, 5, 4, 6), (1, 23, 4, 6, 5), (1, 23, "", 5, 6),
            (1, 23, -4, 5, 6), (1, 23, "\u00e9", 5, 6), (1, 23, "\\u00e9", 5, 6)]
    assert len({keyed_uniform(*key) for key in keys}) == len(keys)


def test_uniform_does_not_depend_on_the_integer_type():
    """A loader may hand out numpy integers, whose repr differs."""
    assert keyed_uniform(*map(np.int64, (1, 2, 3, 4, 5))) == keyed_uniform(1, 2, 3, 4, 5)


def test_uniforms_are_uniform():
    values = [keyed_uniform(0, step, "g", branch, t)
              for step, branch, t in itertools.product(range(4), range(10), range(100))]
    assert all(0.0 <= u < 1.0 for u in values) and len(set(values)) == len(values)
    bins = Counter(int(u * 10) for u in values)
    assert sum((bins[b] - 400) ** 2 / 400 for b in range(10)) < 27.9  # chi-square, 9 degrees of freedom, p = 0.001


def test_temperature_is_in_the_log_probs():
    """Log-probs at T=1 would make the first ratio exp(-1.20) instead of 1."""
    expected = {0.6: [-0.04154, -3.37487, -5.04154], 1.0: [-0.16985, -2.16985, -3.16985]}
    for temperature, logprobs in expected.items():
        cdf = np.cumsum(np.exp(logprobs))
        got = draw([2.0, 0.0, -1.0], uniforms(cdf[0] / 2, (cdf[0] + cdf[1]) / 2, (cdf[1] + 1) / 2), temperature)
        assert got.token_ids.tolist() == [0, 1, 2]
        assert got.logprobs.tolist() == pytest.approx(logprobs, abs=1e-5)
        assert got.logprobs.dtype == torch.float32 and got.token_ids.dtype == torch.int64
        assert got.kept_mass.tolist() == [0.0] * 3
    assert math.exp(expected[1.0][1] - expected[0.6][1]) == pytest.approx(3.337, abs=1e-2)


def test_log_probs_are_those_of_training_to_the_bit():
    logits = torch.randn(64, 997, generator=torch.Generator().manual_seed(0)).bfloat16()
    u = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = sample(logits, u, 0.7, 1.0)
    training = torch.log_softmax(logits.float() / 0.7, dim=-1)
    assert torch.equal(got.logprobs, training.gather(1, got.token_ids[:, None])[:, 0])


def test_top_p_log_probs_and_the_surviving_mass():
    """The log-ratio that appears when the mass is ignored is log 0.8 = -0.2231."""
    got = draw(np.log([0.5, 0.3, 0.2]), uniforms(0.0, 0.624, 0.626, ALMOST_ONE), top_p=0.8)
    assert got.token_ids.tolist() == [0, 0, 1, 1], "token 2 is outside: 0.5 + 0.3 reaches 0.8"
    assert got.logprobs[0].item() == pytest.approx(math.log(0.625), abs=1e-6)
    assert got.kept_mass.tolist() == pytest.approx([math.log(0.8)] * 4, abs=1e-6)
    full = got.logprobs + got.kept_mass
    assert full.tolist() == pytest.approx(np.log([0.5, 0.5, 0.3, 0.3]).tolist(), abs=1e-6)
    assert (full - got.logprobs)[0].item() == pytest.approx(-0.2231, abs=1e-4)


@pytest.mark.parametrize(
    "top_p, kept",
    [
        (1e-9, [1]), (0.5, [1]), (0.51, [1, 3]), (0.79, [1, 3]), (0.81, [1, 2, 3]),
        (0.96, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3]),
    ],
)
def test_nucleus_keeps_the_token_that_reaches_top_p(top_p, kept):
    """Dropping it, or an empty nucleus at small top_p, are the usual mistakes. Ids are not in order of probability."""
    u = torch.arange(2000, dtype=torch.float64) / 2000
    got = draw(np.log([0.05, 0.5, 0.15, 0.3]), u, top_p=top_p)
    assert sorted(set(got.token_ids.tolist())) == kept
    mass = sum([0.05, 0.5, 0.15, 0.3][i] for i in kept)
    for token in kept:
        p = [0.05, 0.5, 0.15, 0.3][token] / mass
        chosen = got.token_ids == token
        assert chosen.double().mean().item() == pytest.approx(p, abs=2e-3)
        assert got.logprobs[chosen][0].item() == pytest.approx(math.log(p), abs=1e-6)


def test_nucleus_with_ties_is_deterministic():
    got = draw([0.0] * 8, torch.arange(64, dtype=torch.float64) / 64, top_p=0.5)
    assert sorted(set(got.token_ids.tolist())) == [0, 1, 2, 3]


def test_frequencies_follow_the_distribution():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, -3.0])
    got = draw(logits, torch.rand(40000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), 1.5)
    expected = np.exp(logits.double().numpy() / 1.5)
    expected /= expected.sum()
    frequency = torch.bincount(got.token_ids, minlength=5).double().numpy() / 40000
    np.testing.assert_allclose(frequency, expected, atol=0.01)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_token_of_probability_zero_never_comes_out(top_p):
    """At both ends of the interval: u = 0 must skip leading zeros, u near 1 must stop before trailing ones."""
    inf = float("inf")
    got = draw([-inf, -inf, 1.0, -inf, 1.0, -inf, -inf], uniforms(0.0, 0.4999, 0.5001, ALMOST_ONE), top_p=top_p)
    assert got.token_ids.tolist() == [2, 2, 4, 4]
    assert got.logprobs.tolist() == pytest.approx([math.log(0.5)] * 4, abs=1e-6)


def test_largest_uniform_on_a_wide_vocabulary():
    """Comes out as the last token that adds to the sum, not the last (probability exp(-200)), not the first."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 5000, generator=generator)
    logits[:, 4990:] = -200.0
    logits[:, 4998:] = -float("inf")
    for u in (ALMOST_ONE, 1.0):
        got = sample(logits, torch.full((200,), u, dtype=torch.float64), 1.0)
        assert got.token_ids.unique().tolist() == [4989]


def test_a_token_owns_its_left_edge():
    """u in [0, p0) is token 0, so u = p0 is token 1: every token has exactly its own share of the uniforms."""
    assert draw([0.0, 0.0, 0.0, 0.0], uniforms(0.0, 0.25, 0.5, 0.75)).token_ids.tolist() == [0, 1, 2, 3]


def test_rounding_of_a_parallel_cumulative_sum(monkeypatch):
    """A scan in blocks need not be monotone: let it overshoot where the probability is zero."""
    cumsum = torch.Tensor.cumsum
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: cumsum(x, dim) + 1e-9 * (x == 0))
    got = draw([0.0, -math.inf, 0.0, -math.inf], uniforms(0.5 - 1e-10, 0.5, 0.5 + 1e-10, ALMOST_ONE))
    assert got.token_ids.tolist() == [0, 2, 2, 2]


def test_rows_do_not_depend_on_their_neighbours():
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(2))
    u = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for top_p in (1.0, 0.7):
        together = sample(logits, u, 0.9, top_p)
        for i in range(7):
            alone = sample(logits[i : i + 1], u[i : i + 1], 0.9, top_p)
            assert all(torch.equal(a[i : i + 1], b) for a, b in zip(together, alone))


@pytest.mark.parametrize("bad", [[math.nan, 0.0, 0.0], [math.inf, 0.0, 0.0], [0.0, 0.0, math.inf], [-math.inf] * 3])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_unusable_row_shows_in_its_log_prob_only(bad, top_p):
    got = sample(torch.tensor([bad, [0.0, 5.0, 0.0]]), uniforms(0.5, 0.5), 1.0, top_p)
    assert not got.logprobs[0].isfinite() and got.logprobs[1].isfinite() and got.token_ids[1] == 1


def test_zero_rows_and_gradient_free():
    got = sample(torch.zeros(0, 5), uniforms(), 1.0, 0.5)
    assert [x.shape for x in got] == [torch.Size([0])] * 3
    logits = torch.zeros(1, 5, requires_grad=True)
    assert not sample(logits, uniforms(0.5), 1.0).logprobs.requires_grad


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_temperature_out_of_range(temperature):
    with pytest.raises(ValueError, match="--temperature"):
        sample(torch.zeros(1, 3), uniforms(0.5), temperature)


@pytest.mark.parametrize("top_p", [0.0, -0.1, 1.1, math.nan])
def test_top_p_out_of_range(top_p):
    with pytest.raises(ValueError, match="--top-p"):
        sample(torch.zeros(1, 3), uniforms(0.5), 1.0, top_p)


def test_wrong_shapes_and_dtypes():
    """A float32 uniform can be rounded up to 1.0."""
    for logits, u in ((torch.zeros(3), uniforms(0.5)), (torch.zeros(2, 3), uniforms(0.5)),
                      (torch.zeros(1, 3), torch.tensor([0.5]))):
        with pytest.raises(ValueError, match="float64"):
            sample(logits, u, 1.0)
