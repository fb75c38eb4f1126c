"""Textbook attention: scores, mask, softmax, weighted sum. Every score is materialised, gradients are autograd's.

Computes in the dtype of its inputs: float64 for the truth, bfloat16 as the yardstick of what that dtype allows.
"""
from __future__ import annotations

import torch
from torch import Tensor


def dense_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [b, N, S, D]; k, v [b, K, T, D]; visible bool [S, T] -> out [b, N, S, D], lse [b, N, S].

    Query head h reads key-value head h // (N / K). Every row must see at least one key.
    """
    heads_per_kv = q.shape[1] // k.shape[1]
    kv_head = [h // heads_per_kv for h in range(q.shape[1])]
    scores = (q @ k[:, kv_head].transpose(2, 3)) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v[:, kv_head], torch.logsumexp(scores, dim=-1)


def causal(num_queries: int, num_keys: int) -> Tensor:
    """Queries are the last `num_queries` of `num_keys` positions; each sees itself and all before."""
    first = num_keys - num_queries
    return torch.tensor([[key <= first + row for key in range(num_keys)] for row in range(num_queries)])


def attention_after_prefix(q, k, v, prefix_k, prefix_v, scale: float) -> tuple[Tensor, Tensor]:
    """Rows that follow a prefix, one dense causal attention per batch row over prefix + own tokens.

    q, k, v [R, b, heads, D]; prefix_k, prefix_v [P, B, K, D]; batch row i belongs to prompt i // (b / B).
    Returns out [R, b, N, D] and lse [R, b, N].
    """
    rows_per_prompt = q.shape[1] // prefix_k.shape[1]
    owner = [row // rows_per_prompt for row in range(q.shape[1])]
    keys = torch.cat([prefix_k[:, owner], k])
    values = torch.cat([prefix_v[:, owner], v])
    visible = causal(len(q), len(keys))
    out, lse = dense_attention(*(x.permute(1, 2, 0, 3) for x in (q, keys, values)), visible, scale)
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)
