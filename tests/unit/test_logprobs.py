"""Log-probs of labels, their gradients and entropies, one process, against float64 textbook code.

The same with the vocabulary cut over two ranks: tests/distributed/test_vocab_parallel.py.
"""
import math

import pytest
import torch

from megatron_longstraw.mcore.logprobs import VocabParallelLogProb
from tests.oracles.textbook_logprobs import textbook_logprobs
from tests.tolerances import (
    LOGPROB_ABSOLUTE,
    LOGPROB_GRADIENT,
    PUBLISHED_DECIMALS,
    assert_as_good_as,
    relative_error,
)
from tests.tracking import Tracker

ROWS, HIDDEN, VOCAB, PADDED = 13, 8, 50, 64


def inputs(dtype=torch.float32, seed=0, vocab=VOCAB, padded=PADDED):
    """Rows, a weight whose padded part is large (it would win every softmax), labels, incoming gradients."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(padded, HIDDEN, generator=generator).to(dtype)
    weight[vocab:] = 7.0
    labels = torch.randint(0, vocab, (ROWS,), generator=generator)
    labels[:2] = torch.tensor([0, vocab - 1])
    return rows, weight, labels, torch.randn(ROWS, generator=generator)


def package(rows, weight, labels, dlogprobs, temperature=1.0, vocab=VOCAB, chunk_rows=4):
    leaves = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropy = VocabParallelLogProb.apply(*leaves, labels, temperature, vocab, chunk_rows, None)
    logprobs.backward(dlogprobs)
    return logprobs.detach(), entropy, *(leaf.grad for leaf in leaves)


def truth(rows, weight, labels, dlogprobs, temperature=1.0, vocab=VOCAB, dtype=torch.float64):
    leaves = [x.to(dtype).requires_grad_() for x in (rows, weight)]
    logprobs, entropy = textbook_logprobs(*leaves, labels, temperature, vocab)
    (logprobs * dlogprobs.to(dtype)).sum().backward()
    return logprobs.detach(), entropy.detach(), *(leaf.grad for leaf in leaves)


def check(actual, expected):
    for own, right in zip(actual[:2], expected[:2]):
        assert float((own.double() - right).abs().max()) <= LOGPROB_ABSOLUTE
    for own, right in zip(actual[2:], expected[2:]):
        assert relative_error(own, right) <= LOGPROB_GRADIENT


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize("chunk_rows", [1, 4, 13, 1000])
def test_values_and_gradients(temperature, chunk_rows):
    """Log-probs, entropies, and the gradients of rows and weight, for any chunking and temperature. A gradient not
    divided by the temperature, or a last short chunk that is dropped, shows here."""
    check(package(*inputs(), temperature, chunk_rows=chunk_rows), truth(*inputs(), temperature))


@pytest.mark.parametrize(("vocab", "padded"), [(50, 50), (49, 64), (2, 64), (64, 64)])
def test_any_padding_of_the_vocabulary(vocab, padded):
    """The last true id is a label and the first pad is not part of the softmax."""
    data = inputs(vocab=vocab, padded=padded)
    check(package(*data, vocab=vocab), truth(*data, vocab=vocab))


def test_temperature_reference_numbers():
    """C03: logits [2, 0, -1] at T = 0.6 and at T = 1; training at the wrong one starts with a ratio of 3.337."""
    weight = torch.eye(3)
    rows = torch.tensor([[2.0, 0.0, -1.0]] * 3)
    for temperature, expected in ((0.6, [-0.04154, -3.37487, -5.04154]), (1.0, [-0.16985, -2.16985, -3.16985])):
        logprobs, entropy, *_ = package(rows, weight, torch.arange(3), torch.ones(3), temperature, vocab=3)
        assert logprobs.tolist() == pytest.approx(expected, abs=PUBLISHED_DECIMALS)
        own_entropy = -sum(math.exp(x) * x for x in expected)
        assert entropy.tolist() == pytest.approx([own_entropy] * 3, abs=10 * PUBLISHED_DECIMALS)


def test_padded_rows_get_no_probability_and_no_gradient():
    """G02: 1000 ids padded to 1024, all logits 0: log(1/1000), not log(1/1024); pads keep a gradient of exactly 0,
    else the optimizer moves them and Adam's epsilon makes it a step of full size."""
    rows, weight, dlogprobs = torch.ones(4, HIDDEN), torch.zeros(1024, HIDDEN), torch.tensor([1.0, -2.0, 0.5, 3.0])
    labels = torch.tensor([0, 999, 500, 1])
    logprobs, entropy, _, dweight = package(rows, weight, labels, dlogprobs, vocab=1000, chunk_rows=3)
    assert logprobs.tolist() == pytest.approx([-6.90776] * 4, abs=PUBLISHED_DECIMALS)
    assert entropy.tolist() == pytest.approx([6.90776] * 4, abs=PUBLISHED_DECIMALS)
    assert not dweight[1000:].any()
    assert dweight[:1000].any(dim=1).all()


def test_large_pads_change_nothing():
    """Pads that carry whatever values training left in them are as good as absent, to the last bit."""
    rows, weight, labels, dlogprobs = inputs()
    other = weight.clone()
    other[VOCAB:] = -1e4
    first, second = (package(rows, w, labels, dlogprobs) for w in (weight, other))
    for a, b in zip(first, second):
        assert torch.equal(a, b)
    assert not first[3][VOCAB:].any()


def test_far_apart_logits_stay_finite():
    """exp(200) overflows float32; the probability of the other ids is 0, their log-prob is -200."""
    rows, weight = torch.tensor([[200.0], [-200.0]]), torch.tensor([[1.0], [0.0], [-1.0]])
    logprobs, entropy, drows, dweight = package(rows, weight, torch.tensor([0, 0]), torch.ones(2), vocab=3)
    assert logprobs.tolist() == [0.0, -400.0]
    assert entropy.tolist() == pytest.approx([0.0, 0.0], abs=LOGPROB_ABSOLUTE)
    assert drows.tolist() == [[0.0], [2.0]]
    assert torch.isfinite(dweight).all()


def test_entropy_gives_no_gradient():
    """It is a metric here; a gradient would add an entropy bonus that nobody asked for."""
    rows, weight, labels, dlogprobs = inputs()
    rows.requires_grad_()
    logprobs, entropy = VocabParallelLogProb.apply(rows, weight, labels, 1.0, VOCAB, 4, None)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_zero_weight_rows_get_exactly_nothing():
    """Pads of the micro-batch carry weight 0; any rounding they left in the weight gradient would depend on padding."""
    rows, weight, labels, dlogprobs = inputs()
    dlogprobs[5:] = 0.0
    *_, drows, dweight = package(rows, weight, labels, dlogprobs, chunk_rows=5)
    *_, dweight_without = package(rows[:5], weight, labels[:5], dlogprobs[:5], chunk_rows=5)
    assert not drows[5:].any()
    assert torch.equal(dweight, dweight_without)


def test_bfloat16_model():
    """Results are float32, and gradients as close to the truth as dense code in bfloat16 gets."""
    data = inputs(torch.bfloat16)
    actual, expected, rival = package(*data), truth(*data), truth(*data, dtype=torch.bfloat16)
    assert actual[0].dtype == actual[1].dtype == torch.float32
    names = ("logprobs", "entropy", "drows", "dweight")
    assert_as_good_as(*(dict(zip(names, table)) for table in (actual, rival, expected)))


@pytest.mark.parametrize("chunk_rows", [1, 4, 13])
def test_logits_exist_for_one_chunk_only(chunk_rows):
    """C17: at most `chunk_rows` rows of logits at any time, forward or backward, and each row once per direction;
    chunking the reduction alone would still materialise all of them."""
    with Tracker() as tracker:
        package(*inputs(), chunk_rows=chunk_rows)
    assert max(tracker.rows_with_columns(PADDED)) == chunk_rows
    assert tracker.rows_multiplied_to(PADDED) == 2 * ROWS
