"""Group advantages against textbook formulas (stdlib statistics) and the field's reference numbers."""
import math
import random
import statistics
import warnings

import numpy as np
import pytest

from megatron_longstraw.objectives.advantages import ADVANTAGE_ESTIMATORS, group_advantages


@pytest.fixture(autouse=True)
def no_warning():
    """None of these inputs may warn: a RuntimeWarning is a NaN in the making."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def textbook(rewards, has_tokens, norm_by_std=True):
    scored = [r for r, tokens in zip(rewards, has_tokens) if r is not None and tokens]
    mean, std = statistics.fmean(scored), statistics.stdev(scored)
    return [
        (r - mean) / (std + 1e-6 if norm_by_std else 1) if r is not None and tokens else 0.0
        for r, tokens in zip(rewards, has_tokens)
    ]


def of(rewards, **options):
    return group_advantages(rewards, [True] * len(rewards), **options)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_agrees_with_the_textbook_on_ragged_groups(norm_by_std):
    rng = random.Random(0)
    for size in (2, 3, 8, 31):
        rewards = [rng.uniform(-3, 5) for _ in range(size)]
        has_tokens = [True] * size
        if size > 3:
            rewards[1], has_tokens[2] = None, False
        got = group_advantages(rewards, has_tokens, norm_by_std=norm_by_std)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, textbook(rewards, has_tokens, norm_by_std), rtol=1e-12, atol=1e-15)


def test_reference_numbers_of_three_winners_in_eight():
    """Population std (ddof=0) would give +1.2910 / -0.7746, RLOO +0.7143 / -0.4286."""
    rewards = [1.0] * 3 + [0.0] * 5
    assert of(rewards) == pytest.approx([1.2076] * 3 + [-0.7246] * 5, abs=5e-5)
    assert of(rewards, norm_by_std=False) == pytest.approx([0.625] * 3 + [-0.375] * 5, abs=1e-12)
    assert abs(of(rewards).sum()) < 1e-12


def test_epsilon_is_added_to_the_std():
    """Without it, or under the square root, the last digits differ."""
    assert of([1e-4, -1e-4])[0] == pytest.approx(1e-4 / (math.sqrt(2) * 1e-4 + 1e-6), rel=1e-9)


def test_statistics_are_those_of_the_group():
    """Over both groups at once the answer would be [0.5, -1.5, 0.5, 0.5]."""
    assert of([1, 0]) == pytest.approx([0.7071, -0.7071], abs=5e-5)
    assert of([1, 1]).tolist() == [0.0, 0.0]


def test_missing_score_is_not_a_score_of_zero():
    """nansum-style zeros would give mean 0.5 here; the mean over the three scored is 2/3."""
    got = of([1.0, 0.0, 1.0, None], norm_by_std=False)
    assert got == pytest.approx([1 / 3, -2 / 3, 1 / 3, 0.0], abs=1e-12)
    assert of([1, 0, 1, 0], norm_by_std=False) == pytest.approx([0.5, -0.5, 0.5, -0.5])


def test_reward_of_an_empty_response_does_not_leak():
    """Counting it would give the other response an advantage of -0.7071."""
    assert group_advantages([10.0, 0.0], [False, True]).tolist() == [0.0, 0.0]
    three = group_advantages([10.0, 0.0, 1.0], [False, True, True])
    assert three == pytest.approx([0.0, -0.7071, 0.7071], abs=5e-5)


@pytest.mark.parametrize(
    "rewards, has_tokens",
    [
        ([0.3], [True]),
        ([], []),
        ([None, None], [True, True]),
        ([None, 1.0], [True, True]),
        ([1.0, 2.0], [False, False]),
        ([0.0, 0.0, 0.0], [True] * 3),
    ],
)
@pytest.mark.parametrize("norm_by_std", [True, False])
def test_no_signal_is_zero_and_silent(rewards, has_tokens, norm_by_std):
    assert group_advantages(rewards, has_tokens, norm_by_std=norm_by_std).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_rounding_noise_is_not_variance(norm_by_std):
    """std == 0.0 as the criterion lets both groups through."""
    assert not of(np.array([1.0, 1.0, 1.0, 0.99999994], dtype=np.float32), norm_by_std=norm_by_std).any()
    # The rounding of float32 grows with the rewards: an absolute floor lets this one through.
    assert not of(np.array([1000.0, 1000.0, 1000.0, 999.99994], dtype=np.float32), norm_by_std=norm_by_std).any()


def test_small_real_differences_survive_the_floor():
    assert of([1.0, 1.00001])[1] > 0.5
    assert of([1000.0, 1001.0])[1] == pytest.approx(0.7071, abs=5e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e200])
@pytest.mark.parametrize("rest", [[], [0.0, 1.0]])
def test_unusable_reward_is_refused(bad, rest):
    with pytest.raises(ValueError, match="--reward-error-policy"):
        of([bad, *rest])


def test_length_mismatch_is_refused():
    with pytest.raises(ValueError, match="got 2 rewards for 3 responses"):
        group_advantages([1.0, 0.0], [True] * 3)


def test_registry():
    assert ADVANTAGE_ESTIMATORS["grpo"]([1, 0], [True, True], norm_by_std=False).tolist() == [0.5, -0.5]
