"""Every tolerance of the tests, in one table, and the two ways of judging a tensor.

An error is ||actual - expected|| / ||expected||, each quantity for itself (never a cosine: a gradient that is 31 %
wrong can have cosine 0.999). The numbers are about ten times what correct code shows and at least a hundred
times less than the mildest real mistake.
"""
from __future__ import annotations

import torch

RELATIVE = {
    (torch.float64, "value"): 1e-13,
    (torch.float64, "gradient"): 1e-13,
    (torch.float32, "value"): 2e-6,
    (torch.float32, "gradient"): 5e-6,
}
FLOAT32_ROUNDING = 2.0**-23
"""One float32 rounding. An lse of size L carries L of them, which become a relative error of out; merging M blocks
adds up to M."""
LOGPROB_ABSOLUTE = 5e-6
"""float32 log-probs and entropies of a vocabulary of a thousand, in nats."""
LOGPROB_GRADIENT = 5e-6
"""Relative; the head computes its logits in float32 whatever the inputs."""
PUBLISHED_DECIMALS = 6e-6
"""Reference numbers printed with five decimals."""
LOW_PRECISION_FACTOR = 2.0
"""bfloat16 may be this much further from float64 than textbook code that runs in bfloat16."""
NEGLIGIBLE = 1e-6
"""A gradient under this share of all gradients together is judged against these."""


def relative_error(actual: torch.Tensor, expected: torch.Tensor, against: float | None = None) -> float:
    """Norm of the difference over the norm of `expected` (or over `against`), in float64; NaN counts as infinite."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    difference = float((actual.double() - expected.double()).norm())
    scale = float(expected.double().norm()) if against is None else against
    if difference != difference:
        return float("inf")
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))


def errors(actual: dict, expected: dict) -> dict[str, float]:
    """Error of each named tensor; where the expected one is negligible beside all of them together (a softmax over
    one key has dq = 0), the error is taken relative to that whole."""
    assert actual.keys() == expected.keys(), f"got {sorted(actual)}, expected {sorted(expected)}"
    norms = {name: float(value.double().norm()) for name, value in expected.items()}
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    return {
        name: relative_error(actual[name], expected[name], whole if norms[name] <= NEGLIGIBLE * whole else None)
        for name in expected
    }


def assert_close(actual: dict, expected: dict, dtype: torch.dtype, quantity: str) -> None:
    """Every named tensor is within the table's tolerance of `dtype` and `quantity` ("value" or "gradient")."""
    limit = RELATIVE[dtype, quantity]
    wrong = {name: error for name, error in errors(actual, expected).items() if not error <= limit}
    assert not wrong, f"relative errors over {limit}: {wrong}"


def assert_as_good_as(actual: dict, rival: dict, expected: dict) -> None:
    """Every named tensor is about as close to the truth as `rival`, textbook code in the same low precision."""
    own, other = errors(actual, expected), errors(rival, expected)
    wrong = {name: (own[name], other[name]) for name in expected if not own[name] <= LOW_PRECISION_FACTOR * other[name]}
    assert not wrong, f"(error, error of textbook code in the same dtype): {wrong}"
