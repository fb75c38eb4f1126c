"""Choosing the next token: one random number per token, keyed by what the token is and not by who draws it.

A token's number depends on (seed, step, prompt, branch, position) only. The same response comes out for any number
of ranks, any batching of branches, and after a resume, because no generator state exists that could be shared,
split or lost.
"""
from __future__ import annotations

import hashlib
import json
import operator
from typing import NamedTuple

import torch
from torch import Tensor

NUCLEUS_TOLERANCE = 1e-6
"""Relative slack on top_p: float32 probabilities that should sum to top_p may end up just under it."""


class Sampled(NamedTuple):
    """One token per row. logprobs + kept_mass is the log-prob over the whole vocabulary, which training computes."""

    token_ids: Tensor
    """int64 [rows]."""
    logprobs: Tensor
    """float32 [rows]; under the distribution that was sampled from: renormalised over the nucleus if top_p < 1."""
    kept_mass: Tensor
    """float32 [rows]; log of the probability mass of the nucleus, 0 when top_p = 1."""


def keyed_uniform(seed: int, step: int, group_id: int | str, branch: int, position: int) -> float:
    """The random number in [0, 1) of one token, a multiple of 2**-53.

    Args:
        group_id: 1 and "1" are different groups.
        position: index of the token in its response.
    """
    if not isinstance(group_id, str):
        group_id = operator.index(group_id)  # numpy integers print differently from Python's
    numbers = [operator.index(n) for n in (seed, step, branch, position)]
    # JSON keeps the fields apart (1, 23 is not 12, 3) and an integer apart from its spelling.
    key = json.dumps([group_id, *numbers]).encode("ascii")
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53  # 53 bits: rounding can never reach 1.0


@torch.no_grad()
def sample(logits: Tensor, uniforms: Tensor, temperature: float, top_p: float = 1.0) -> Sampled:
    """Sample by inverse CDF in token-id order.

    Log-probs are log_softmax(logits / temperature) in float32, as on the training side; the CDF is float64. The
    nucleus is the smallest set of most probable tokens whose mass reaches top_p (the token that reaches it is kept;
    at equal probability lower ids come first).

    Args:
        logits: [rows, vocab], any float dtype; entries outside the true vocabulary already cut off or -inf.
        uniforms: float64 [rows], in [0, 1).

    Shapes: see Sampled. A token of probability 0 is never returned. A row of unusable logits (NaN, +inf, all -inf)
    comes back with a log-prob that is not finite: raising on one pipeline stage would leave the others waiting.
    Gradient: none.

    Raises:
        ValueError: temperature or top_p out of range, or shapes and dtypes other than the above.
    """
    if not 0.0 < temperature < float("inf"):
        raise ValueError(f"got temperature {temperature}; need a finite number above 0; change --temperature")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"got top_p {top_p}; need a number in (0, 1], 1 keeps every token; change --top-p")
    if logits.ndim != 2 or uniforms.shape != logits.shape[:1] or uniforms.dtype != torch.float64:
        raise ValueError(
            f"got logits {tuple(logits.shape)} and uniforms {tuple(uniforms.shape)} of {uniforms.dtype}; "
            f"need [rows, vocab] and float64 [rows]"
        )
    full_logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    probabilities = full_logprobs.double().exp()
    if top_p < 1.0:
        probabilities = _keep_nucleus(probabilities, top_p)
        kept_mass = probabilities.sum(-1).log().clamp(max=0.0).float()
    else:
        kept_mass = torch.zeros_like(full_logprobs[:, 0])
    token_ids = _inverse_cdf(probabilities, uniforms)
    return Sampled(token_ids, full_logprobs.gather(1, token_ids[:, None]).squeeze(1) - kept_mass, kept_mass)


def _keep_nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Probabilities [rows, vocab] with everything outside the nucleus set to 0, not renormalised."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(-1) - ordered
    kept = ordered * (mass_before < top_p * (1.0 - NUCLEUS_TOLERANCE))  # the first token has mass 0 before it
    return torch.zeros_like(probabilities).scatter_(1, order, kept)


def _inverse_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """First token of each row whose cumulative mass exceeds uniform * total; probabilities need not sum to 1."""
    # A cumulative sum done in parallel may dip by rounding, so tokens of probability 0 are excluded by name.
    cumulative = probabilities.cumsum(-1).masked_fill(probabilities <= 0, -1.0)
    total = cumulative.amax(-1)
    # No token exceeds the total itself: a uniform of 1.0 is taken as the largest number below it.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative > target[:, None]).int().argmax(-1)
