"""Finding a user's reward function, and the one place that calls it.

A reward function has verl's four arguments, passed by name:

    def score(data_source, solution_str, ground_truth, extra_info): ...

and returns a number, a dict with the number under "score" (its other numbers become metrics), or None: no score.
"""
from __future__ import annotations

import difflib
import importlib
import numbers
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Sequence

import numpy as np

from ..types import LARGEST_REWARD, PromptGroup

ERROR_POLICIES = ("fail", "zero", "skip")


class RewardError(RuntimeError):
    """A reward function raised, or returned something that is not a number, under the policy "fail"."""


@dataclass
class RewardReport:
    """What happened to the responses of one or more groups; the four counts add up to their number."""

    scored: int = 0
    abstained: int = 0
    """The function returned None: no score, no weight."""
    failed: int = 0
    """The function raised or returned no number; reward 0.0 (zero) or None (skip)."""
    empty: int = 0
    """No tokens, so nothing to score."""

    def __add__(self, other: RewardReport) -> RewardReport:
        names = ("scored", "abstained", "failed", "empty")
        return RewardReport(**{name: getattr(self, name) + getattr(other, name) for name in names})


def load_function(spec: str, flag: str = "--reward-function") -> Callable[..., Any]:
    """The function a user named as "package.module:function".

    Raises:
        ValueError: the string has another shape, the module cannot be imported, or it has no such callable.
    """
    module_name, _, name = spec.partition(":")
    if not (all(part.isidentifier() for part in module_name.split(".")) and name.isidentifier()):
        raise ValueError(
            f"got {flag} {spec!r}; need package.module:function, an importable module (not a file path) and a "
            f"function in it, for example megatron_longstraw.rewards.exact_match:score"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"got {flag} {spec!r}; module {module_name!r} cannot be imported: {error}; need a module that Python "
            f"finds: install it, start in its folder, or put that on PYTHONPATH (not for bash launch/...)"
        ) from error
    if not hasattr(module, name):
        close = difflib.get_close_matches(name, vars(module), n=3)
        hint = f" (it has {', '.join(close)})" if close else ""
        raise ValueError(f"got {flag} {spec!r}; module {module_name!r} has no {name!r}{hint}; change {flag}")
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(f"got {flag} {spec!r}; that is a {type(function).__name__}; need a function; change {flag}")
    return function


def source_of(function: Callable[..., Any]) -> bytes:
    """What tells a user's function from another, or from an earlier version of itself: its name, and the bytes of the
    file it stands in (of what that imports nothing)."""
    module = getattr(function, "__module__", "")
    name = f"{module}:{getattr(function, '__qualname__', type(function).__name__)}"
    file = getattr(sys.modules.get(module), "__file__", None)
    return name.encode() + (b"" if file is None else Path(file).read_bytes())


def score_group(
    group: PromptGroup,
    solution_strs: Sequence[str],
    reward_function: Callable[..., Any],
    error_policy: str = "fail",
) -> RewardReport:
    """Set `reward`, `rewards` and `reward_failed` of every branch of a group, replacing what was there.

    An empty response is not scored (None). When the function raises or returns no usable number, error_policy
    decides: "fail" raises and leaves the group as it was, "zero" rewards 0.0, "skip" gives no score.

    Args:
        solution_strs: decoded text of each response, in branch order.

    Raises:
        RewardError: policy "fail"; names the group, the branch, the value, and chains what the function raised.
        ValueError: unknown policy, or not one text per response.
    """
    if error_policy not in ERROR_POLICIES:
        raise ValueError(
            f"got error policy {error_policy!r}; need one of {', '.join(ERROR_POLICIES)}; change --reward-error-policy"
        )
    if len(solution_strs) != len(group.branches):
        raise ValueError(
            f"got {len(solution_strs)} texts for the {len(group.branches)} responses of group {group.group_id!r}; "
            f"need one text per response"
        )
    report, rewards = RewardReport(), []
    for i, (branch, solution_str) in enumerate(zip(group.branches, solution_strs)):
        if branch.num_tokens == 0:
            report.empty += 1
            rewards.append((None, {}, False))
            continue
        result, error = _call(reward_function, group, solution_str)
        value = result.get("score", _MISSING) if isinstance(result, dict) else result
        reward = _as_number(value)
        failed = error is not None or value is not None and reward is None
        if not failed and value is None:
            report.abstained += 1
        elif not failed:
            report.scored += 1
        elif error_policy == "fail":
            raise RewardError(_describe_failure(group, i, result, error)) from error
        else:
            report.failed += 1
            reward, result = (0.0 if error_policy == "zero" else None), None
        rewards.append((reward, _other_numbers(result), failed))
    for branch, values in zip(group.branches, rewards):
        branch.reward, branch.rewards, branch.reward_failed = values
    return report


_MISSING = object()


def _call(reward_function: Callable[..., Any], group: PromptGroup, solution_str: str) -> tuple[Any, Exception | None]:
    """What the user's function returned and raised."""
    try:
        # A copy, so that a function which writes into it cannot change how the next response is scored.
        extra_info = dict(group.extra_info)
        result = reward_function(
            data_source=group.data_source,
            solution_str=solution_str,
            ground_truth=group.ground_truth,
            extra_info=extra_info,
        )
    except Exception as error:  # the contract of --reward-error-policy covers whatever the user's function raises
        return None, error
    return result, None


def _as_number(value: Any) -> float | None:
    """A finite real number (bool included) as a float; None for NaN, infinities and anything else."""
    if isinstance(value, np.generic):
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) and abs(value) < LARGEST_REWARD else None


def _other_numbers(result: Any) -> dict[str, float]:
    """The numbers of a returned dict other than its score."""
    numbers = {name: _as_number(value) for name, value in (result.items() if isinstance(result, dict) else ())}
    return {str(name): number for name, number in numbers.items() if name != "score" and number is not None}


def _describe_failure(group: PromptGroup, branch_index: int, result: Any, error: Exception | None) -> str:
    what = f"raised {type(error).__name__}: {error}" if error is not None else f"returned {result!r}"
    return (
        f"reward function {what} for branch {branch_index} of group {group.group_id!r}; need a finite number, a dict "
        f'with one under "score", or None for no score; --reward-error-policy zero or skip goes on without it'
    )
