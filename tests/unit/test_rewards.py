"""Loading a user's reward function, calling it, and what happens when it misbehaves."""
import fractions
import math
import sys

import numpy as np
import pytest

from megatron_longstraw.rewards import exact_match
from megatron_longstraw.rewards.loading import RewardError, RewardReport, load_function, score_group
from megatron_longstraw.rollout.scoring import rollout_metrics
from megatron_longstraw.types import Branch, PromptGroup


def group_of(*lengths, **fields):
    branches = [Branch(response_ids=list(range(n))) for n in lengths]
    return PromptGroup(prompt_ids=[1, 2], branches=branches, **{"group_id": "g7", "data_source": "toy", **fields})


def returning(*values):
    """A reward function that returns (or raises) these, one per call."""
    remaining = list(values)

    def reward(data_source, solution_str, ground_truth, extra_info):
        value = remaining.pop(0)
        if isinstance(value, Exception):
            raise value
        return value

    return reward


def rewards_of(group):
    return [branch.reward for branch in group.branches]


def counts(report):
    return report.scored, report.abstained, report.failed, report.empty


@pytest.mark.parametrize(
    "solution, truth, expected",
    [
        ("42", "42", 1.0),
        (" 42\n", "42 ", 1.0),
        ("4 2", "42", 0.0),
        ("the answer is 42", "42", 0.0),
        ("Yes", "yes", 0.0),
        ("b", ["a", " b "], 1.0),
        ("c", ("a", "b"), 0.0),
        ("b", np.array(["a", "b"]), 1.0),
        ("42", 42, 1.0),
        ("", "42", 0.0),
        ("a", "abc", 0.0),
    ],
)
def test_exact_match(solution, truth, expected):
    got = exact_match.score(data_source="toy", solution_str=solution, ground_truth=truth, extra_info={})
    assert got == expected and type(got) is float


@pytest.mark.parametrize("truth", [None, [], [None, "a"]])
def test_exact_match_without_an_answer_is_an_error(truth):
    """str(None) would reward the answer "None"."""
    with pytest.raises(ValueError, match="ground_truth.*toy"):
        exact_match.score("toy", "None", truth, {})


def test_load_function():
    assert load_function("megatron_longstraw.rewards.exact_match:score") is exact_match.score


@pytest.mark.parametrize(
    "spec, message",
    [
        ("my_rewards", "need package.module:function"),
        ("", "need package.module:function"),
        (":score", "need package.module:function"),
        ("math:", "need package.module:function"),
        ("math:a:b", "need package.module:function"),
        ("rewards/mine.py:score", "not a file path"),
        (".mine:score", "need package.module:function"),
        ("no_such_module_here:score", "cannot be imported.*PYTHONPATH"),
        ("math.nothing:score", "cannot be imported"),
        ("megatron_longstraw.rewards.exact_match:scores", "has no 'scores'.*it has score"),
        ("math:pi", "is a float; need a function"),
    ],
)
def test_load_function_errors_name_value_and_flag(spec, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_function(spec, flag="--my-flag")
    assert repr(spec) in str(caught.value) and "--my-flag" in str(caught.value)


def test_missing_dependency_of_the_user_module_is_named(tmp_path, monkeypatch):
    """Saying only that the user's module is missing would send them to look in the wrong place."""
    (tmp_path / "reward_with_dependency.py").write_text("import a_package_nobody_has\ndef score(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="reward_with_dependency.*a_package_nobody_has") as caught:
        load_function("reward_with_dependency:score")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    sys.modules.pop("reward_with_dependency", None)


def test_error_inside_the_user_module_is_not_disguised(tmp_path, monkeypatch):
    (tmp_path / "reward_that_breaks.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError):
        load_function("reward_that_breaks:score")


def test_function_receives_the_four_arguments_by_name():
    calls = []

    def reward(extra_info, ground_truth, solution_str, data_source):  # another order than ours
        calls.append((data_source, solution_str, ground_truth, dict(extra_info)))
        extra_info["seen"] = True
        return 0.5

    group = group_of(2, 3, ground_truth=["x"], extra_info={"k": 1})
    report = score_group(group, [" a", "b"], reward, "fail")
    assert calls == [("toy", " a", ["x"], {"k": 1}), ("toy", "b", ["x"], {"k": 1})]
    assert rewards_of(group) == [0.5, 0.5] and counts(report) == (2, 0, 0, 0)
    assert group.extra_info == {"k": 1}


@pytest.mark.parametrize(
    "value, expected",
    [
        (1, 1.0),
        (0, 0.0),
        (True, 1.0),
        (-2.5, -2.5),
        (np.float32(0.25), 0.25),
        (np.float16(0.25), 0.25),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (fractions.Fraction(1, 4), 0.25),
        ({"score": 0.75, "acc": True}, 0.75),
    ],
)
@pytest.mark.filterwarnings("error")
def test_accepted_values(value, expected):
    group = group_of(1)
    assert counts(score_group(group, ["a"], returning(value), "fail")) == (1, 0, 0, 0)
    assert rewards_of(group) == [expected] and type(group.branches[0].reward) is float


def test_none_abstains_and_is_not_zero():
    group = group_of(1, 1, 1)
    report = score_group(group, ["a"] * 3, returning(None, 0.0, {"score": None, "acc": 1}), "fail")
    assert rewards_of(group) == [None, 0.0, None] and counts(report) == (1, 2, 0, 0)


def test_empty_response_is_not_scored():
    """The function is not even asked: it would see an empty text and might reward it."""
    group = group_of(0, 2)
    group.branches[0].reward = 10.0
    report = score_group(group, ["", "a"], returning(1.0), "fail")
    assert rewards_of(group) == [None, 1.0] and counts(report) == (1, 0, 0, 1)


def test_other_numbers_of_a_dict_become_metrics():
    group = group_of(1, 1, 1)
    values = (
        {"score": 1.0, "acc": True, "length": 4, "note": "text", "bad": math.nan},
        {"score": 0.0, "acc": False, "bad": 2.0},
        {"score": None, "acc": True},
    )
    report = score_group(group, ["a"] * 3, returning(*values), "fail")
    others = [{"acc": 1.0, "length": 4.0}, {"acc": 0.0, "bad": 2.0}, {"acc": 1.0}]
    assert [branch.rewards for branch in group.branches] == others
    metrics = rollout_metrics([group], report).to_means()
    assert {name: metrics[f"reward/{name}"] for name in ("acc", "length", "bad")} == {"acc": 2 / 3, "length": 4.0, "bad": 2.0}
    assert counts(report + RewardReport(scored=2, failed=1)) == (4, 1, 1, 0)


FAILURES = [
    KeyError("boom"),
    math.nan,
    math.inf,
    -math.inf,
    np.float32("nan"),
    10**400,
    "1.0",
    [1.0],
    1j,
    {"acc": 1.0},
    {"score": math.nan, "acc": 1.0},
]


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
def test_policy_fail(failure):
    group = group_of(1, 1)
    with pytest.raises(RewardError) as caught:
        score_group(group, ["a", "b"], returning(1.0, failure), "fail")
    message = str(caught.value)
    assert "branch 1" in message and "'g7'" in message and "--reward-error-policy" in message
    if isinstance(failure, Exception):
        assert caught.value.__cause__ is failure and "KeyError: 'boom'" in message
    else:
        assert repr(failure) in message
    assert rewards_of(group) == [None, None], "a group is scored as a whole or not at all"


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
@pytest.mark.parametrize("policy, reward", [("zero", 0.0), ("skip", None)])
def test_policies_zero_and_skip(failure, policy, reward):
    group = group_of(1, 0, 1, 1)
    report = score_group(group, ["a", "", "b", "c"], returning(1.0, failure, 0.5), policy)
    assert rewards_of(group) == [1.0, None, reward, 0.5] and counts(report) == (2, 0, 1, 1)
    assert [branch.rewards for branch in group.branches] == [{}] * 4


@pytest.mark.parametrize("policy", ["fail", "zero", "skip"])
def test_interrupt_is_not_an_error_of_the_reward(policy):
    def interrupted(**_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_group(group_of(1), ["a"], interrupted, policy)


def test_wrong_policy_and_wrong_number_of_texts():
    with pytest.raises(ValueError, match="'ignore'.*fail, zero, skip.*--reward-error-policy"):
        score_group(group_of(1), ["a"], returning(1.0), "ignore")
    with pytest.raises(ValueError, match="got 1 texts for the 2 responses of group 'g7'"):
        score_group(group_of(1, 1), ["a"], returning(1.0, 1.0), "fail")
