"""Partial attention `(out, lse)` and its exact backward, one function pair per backend.

A partial attention sees only some of the keys. Its backward takes the GLOBAL `out` and `lse` of the rows
(those over all keys) and is then exact for its own keys: P = exp(q k^T * scale - lse) are the true
probabilities. This is the identity behind ring attention (arXiv 2310.01889) and it is all that sharded
prefixes, shared prefixes and chunked prompts need.

Only full rectangles and causal squares are launched. An empty block kills some kernels (zero-length keys on
the CPU raise SIGFPE) and a fully masked row comes back with lse 0 instead of -inf, so masks never decide
which rows exist: callers slice.

Conventions: q, out, dout [B, N, S, D]; k, v [B, K, T, D] with N a multiple of K (grouped queries, unexpanded);
any strides with a contiguous head dim. lse [B, N, S], natural logarithm, float32 (float64 for float64 inputs). dk, dv come back in the
input dtype: accumulate them in float32.
"""
from __future__ import annotations

import contextlib

import torch
from torch import Tensor

_aten = torch.ops.aten


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of every query over these keys only: `(out, lse)`. `causal` needs S == T."""
    _check_block(q, k, causal)
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if q.dtype in (torch.bfloat16, torch.float16):
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
        return out, lse[..., : q.shape[2]]
    out, lse = _aten._scaled_dot_product_efficient_attention(
        q, *_expand_kv(q, k, v), None, True, 0.0, causal, scale=scale
    )[:2]
    return out, lse[..., : q.shape[2]]


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)` of these keys' share, given the rows' GLOBAL `out` and `lse`.

    dq sums over blocks; dk, dv are complete for these keys once every query block has been added.
    """
    _check_block(q, k, causal)
    if q.device.type == "cpu":
        with _one_thread_if_one_head(q):
            return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse, 0.0, causal, scale=scale
            )
    if q.dtype in (torch.bfloat16, torch.float16):
        return _cuda_flash_backward(dout, q, k, v, out, lse, causal, scale)
    return _cuda_efficient_backward(dout, q, k, v, out, lse, causal, scale)


def _check_block(q: Tensor, k: Tensor, causal: bool) -> None:
    assert q.shape[2] > 0 and k.shape[2] > 0, f"empty attention block: {q.shape[2]} queries, {k.shape[2]} keys"
    # The CPU kernel reads other layouts of the last dim wrongly, without an error.
    assert q.stride(-1) == k.stride(-1) == 1, f"head dim must be contiguous, got strides {q.stride()}, {k.stride()}"
    assert not causal or q.shape[2] == k.shape[2], f"causal block {q.shape[2]}x{k.shape[2]} is not square"


@contextlib.contextmanager
def _one_thread_if_one_head(q: Tensor):
    """The CPU kernel's backward splits work over batch x heads; with one of them, threads only fight
    (measured 7 to 180 times its forward, 2.5 times on one thread)."""
    threads = torch.get_num_threads()
    if q.shape[0] * q.shape[1] > 1 or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _cuda_flash_backward(dout, q, k, v, out, lse, causal, scale):
    # The RNG arguments only matter with dropout, which is refused; zero-sized stand-ins satisfy the schema.
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    offset = torch.empty(0, dtype=torch.uint64, device=q.device)
    return _aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset, scale=scale
    )


def _cuda_efficient_backward(dout, q, k, v, out, lse, causal, scale):
    k_all, v_all = _expand_kv(q, k, v)
    # The kernel wants lse rows padded to its tile of 32.
    rows = q.shape[2]
    padded = torch.nn.functional.pad(lse, (0, -rows % 32)).contiguous()
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k_all, v_all, None, out, padded, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
    )
    groups = (k.shape[0], k.shape[1], q.shape[1] // k.shape[1], k.shape[2], k.shape[3])
    return dq, dk.reshape(groups).sum(2), dv.reshape(groups).sum(2)


def _expand_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The memory-efficient CUDA kernel (float32) has no grouped queries; blocks are bounded, so a copy is too."""
    repeat = q.shape[1] // k.shape[1]
    return (k, v) if repeat == 1 else (k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1))
