"""Attention of a micro-batch over a sharded, shared prefix and over itself (DESIGN section 4).

Per layer: all-gather q over cp; partial attention of all queries against this rank's stored K, V and own rows;
merge over ranks by log-sum-exp. Backward gathers (q, out, dout) once, runs each block's exact backward with
the global out and lse, and reduce-scatters dq. Communication is proportional to the micro-batch, never to the
prefix.

All branches of a micro-batch that share a prompt meet its prefix in ONE rectangle: their rows are folded onto
the sequence dim of the query. The causal part stays per branch.

Shapes: S rows of all cp ranks, s of this rank (S = cp * s), b batch rows = B prompts x n branches, N query
heads, K key-value heads, D head dim. Module border: q, out [s, b, N, D]; k, v [s, b, K, D]; lse [s, b, N].
"""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longstraw.attention.kernels import attend, attend_backward
from megatron_longstraw.attention.merge import AttentionAccumulator, accumulation_dtype
from megatron_longstraw.context_parallel.collectives import (
    all_gather_rows,
    group_rank,
    group_size,
    merge_over_ranks,
    reduce_scatter_rows,
)
from megatron_longstraw.prefix.microbatch import MicroBatch
from megatron_longstraw.prefix.state import TokenState


def fold(x_SbND: Tensor, num_prompts: int) -> Tensor:
    """[S, B*n, N, ...] -> [B, N, S*n, ...]: all rows of one prompt on one sequence dim (a view for B == 1)."""
    s, b, heads, *tail = x_SbND.shape
    x = x_SbND.reshape(s, num_prompts, b // num_prompts, heads, *tail)
    return x.permute(1, 3, 0, 2, *range(4, x.dim())).reshape(num_prompts, heads, -1, *tail)


def unfold(x_BNTD: Tensor, num_rows: int) -> Tensor:
    """Inverse of `fold`: [B, N, S*n, ...] -> [S, B*n, N, ...]."""
    prompts, heads, total, *tail = x_BNTD.shape
    x = x_BNTD.reshape(prompts, heads, num_rows, total // num_rows, *tail)
    return x.permute(2, 0, 3, 1, *range(4, x.dim())).reshape(num_rows, -1, heads, *tail)


def _heads_first(x_SbND: Tensor) -> Tensor:
    """[S, b, N, ...] -> [b, N, S, ...] as a view: what the kernels take."""
    return x_SbND.permute(1, 2, 0, *range(3, x_SbND.dim()))


def _rows_first(x_bNSD: Tensor) -> Tensor:
    return x_bNSD.permute(2, 0, 1, *range(3, x_bNSD.dim()))


def prefix_attention(
    q_SbND: Tensor, state: TokenState | None, visible_tokens: int, num_prompts: int, scale: float, acc: AttentionAccumulator
) -> None:
    """Merge into `acc` the attention of all rows over this rank's first `visible_tokens` stored tokens."""
    if not visible_tokens:
        return
    everything = slice(0, q_SbND.shape[0])
    folded = fold(q_SbND, num_prompts)
    for block in state.blocks(visible_tokens):
        out, lse = attend(folded, block.k, block.v, causal=False, scale=scale)
        acc.add(everything, unfold(out, q_SbND.shape[0]), unfold(lse, q_SbND.shape[0]))


class BranchAttention(torch.autograd.Function):
    """`(out, lse) = BranchAttention.apply(q, k, v, mb, state, scale, cp_group, known)`.

    Gradient: dq is complete (summed over cp by reduce-scatter); dk, dv of the rows stay with their owner and
    are complete because the owner sees every query; dK, dV of the prefix go to `state` (when it wants them) and
    nowhere else. With `mb.seeded`, dk, dv additionally receive what `state` collected for these rows, READ AT
    BACKWARD TIME: by then every later reader has added its share (at forward time, under a pipeline, not yet).
    `lse` gets no gradient. The rows of a chunk are K, V as the state stores them, for the chunk itself too
    (otherwise the function would depend on where the prompt is cut), and dk, dv pass that rounding unchanged.

    `known`: (out, lse) of an earlier forward on the same input, or None to compute them.
    """

    @staticmethod
    def forward(ctx, q, k, v, mb: MicroBatch, state: TokenState | None, scale: float, cp_group, known):
        if mb.chunk_index is not None:
            k, v = state.as_stored(k), state.as_stored(v)
        out, lse = known if known is not None else _forward(q, k, v, mb, state, scale, cp_group)
        # A fresh view: autograd marks what it returns, and kept tensors must stay plain storage.
        out, lse = out.detach(), lse.detach()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.facts = (mb, state, scale, cp_group)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _dlse):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = _backward(dout, q, k, v, out, lse, *ctx.facts)
        return dq, dk, dv, None, None, None, None, None


class SeedOnly(torch.autograd.Function):
    """`zeros = SeedOnly.apply(k, v, mb, state, shape)`: a chunk that is stored but attends to nothing.

    Gradient: with `mb.seeded`, dk, dv are what `state` collected for these rows, read at backward time; else 0.
    """

    @staticmethod
    def forward(ctx, k, v, mb: MicroBatch, state: TokenState | None, shape: torch.Size):
        ctx.like = tuple((x.shape, x.dtype, x.device) for x in (k, v))
        ctx.facts = (mb, state)
        return k.new_zeros(shape)

    @staticmethod
    def backward(ctx, _dout):
        mb, state = ctx.facts
        dk, dv = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
        if mb.seeded:
            _add_seed(dk, dv, mb, state)
        return dk, dv, None, None, None


def _forward(q, k, v, mb: MicroBatch, state, scale, cp_group) -> tuple[Tensor, Tensor]:
    rows, rank = q.shape[0], group_rank(cp_group)
    if group_size(cp_group) == 1 and not mb.visible_tokens:
        out, lse = attend(_heads_first(q), _heads_first(k), _heads_first(v), causal=True, scale=scale)
        return _rows_first(out).contiguous(), _rows_first(lse)
    q_all = all_gather_rows(q, cp_group)
    acc = AttentionAccumulator(q_all)
    prefix_attention(q_all, state, mb.visible_tokens, mb.num_prompts, scale, acc)
    for queries, causal in _own_blocks(rows, rank, q_all.shape[0]):
        out, lse = attend(
            _heads_first(q_all[queries]), _heads_first(k), _heads_first(v), causal=causal, scale=scale
        )
        acc.add(queries, _rows_first(out), _rows_first(lse))
    out, lse = merge_over_ranks(acc.out_SBND, acc.lse_SBN, cp_group)
    return out.to(q.dtype).contiguous(), lse


def _own_blocks(rows: int, rank: int, total_rows: int):
    """Query slices that see this rank's own rows: the causal square, and all rows of later ranks."""
    begin, end = rank * rows, (rank + 1) * rows
    yield slice(begin, end), True
    if end < total_rows:
        yield slice(end, total_rows), False


def _backward(dout, q, k, v, out, lse, mb: MicroBatch, state, scale, cp_group):
    rows, rank = q.shape[0], group_rank(cp_group)
    dtype = accumulation_dtype(q.dtype)
    q_all, out_all, dout_all = _gather_stacked((q, out, dout.to(q.dtype)), cp_group)
    lse_all = all_gather_rows(lse, cp_group)
    dq_all = torch.zeros(q_all.shape, dtype=dtype, device=q.device)
    if mb.visible_tokens:
        operands = [fold(x, mb.num_prompts) for x in (dout_all, q_all, out_all, lse_all)]
        for block in state.blocks(mb.visible_tokens):
            dout_f, q_f, out_f, lse_f = operands
            dq, dk, dv = attend_backward(dout_f, q_f, block.k, block.v, out_f, lse_f, causal=False, scale=scale)
            dq_all += unfold(dq, q_all.shape[0])
            if block.wants_grad:
                state.add_grad(block, dk, dv)
    dk_own, dv_own = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    for queries, causal in _own_blocks(rows, rank, q_all.shape[0]):
        dq, dk, dv = attend_backward(
            *(_heads_first(x) for x in (dout_all[queries], q_all[queries], k, v, out_all[queries], lse_all[queries])),
            causal=causal,
            scale=scale,
        )
        dq_all[queries] += _rows_first(dq)
        dk_own += _rows_first(dk)
        dv_own += _rows_first(dv)
    if mb.seeded:
        _add_seed(dk_own, dv_own, mb, state)
        state.drop_attention(mb.chunk_index)
    dq = reduce_scatter_rows(dq_all, cp_group)
    return dq.to(q.dtype), dk_own.to(k.dtype), dv_own.to(v.dtype)


def _gather_stacked(tensors: tuple[Tensor, ...], cp_group: dist.ProcessGroup | None) -> tuple[Tensor, ...]:
    """All-gather equally shaped [s, ...] tensors over cp with one message."""
    if group_size(cp_group) == 1:
        return tensors
    return all_gather_rows(torch.stack(tensors, dim=1), cp_group).unbind(1)


def _add_seed(dk_own: Tensor, dv_own: Tensor, mb: MicroBatch, state: TokenState) -> None:
    valid = mb.valid_local_tokens
    seed = state.take_grad(mb.visible_tokens, valid)
    if seed is not None:
        dk_own[:valid] += seed[0].permute(2, 0, 1, 3)
        dv_own[:valid] += seed[1].permute(2, 0, 1, 3)
