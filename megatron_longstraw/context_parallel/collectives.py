"""Collectives along the sequence dimension (dim 0) of an explicit group. None of them is differentiable:
the attention Function that uses them writes its own backward.

A `group` of None or of size 1 means no context parallelism: tensors pass through untouched.
"""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def group_size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def group_rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def all_gather_rows(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[s, ...] of each rank -> [cp * s, ...] on every rank, in rank order."""
    size = group_size(group)
    if size == 1:
        return rows
    gathered = rows.new_empty((size * rows.shape[0], *rows.shape[1:]))
    dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
    return gathered


def reduce_scatter_rows(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[cp * s, ...] on each rank -> the sum over ranks of this rank's own [s, ...]."""
    size = group_size(group)
    if size == 1:
        return rows
    scattered = rows.new_empty((rows.shape[0] // size, *rows.shape[1:]))
    dist.reduce_scatter_tensor(scattered, rows.contiguous(), group=group)
    return scattered


def merge_over_ranks(out_SBND: Tensor, lse_SBN: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Merge each rank's partial attention of ALL rows; every rank gets its own rows of the result.

    Rows whose keys all live elsewhere have lse -inf here; over all ranks each row has seen at least itself.

    Returns:
        out [s, B, N, D] and lse [s, B, N] over the keys of all ranks, in the accumulation dtype.
    """
    size = group_size(group)
    if size == 1:
        return out_SBND, lse_SBN
    lse_all = all_gather_rows(lse_SBN.unsqueeze(0), group)  # [cp, S, B, N]
    rank, rows = group_rank(group), out_SBND.shape[0] // size
    share = torch.softmax(lse_all, dim=0)[rank].unsqueeze(-1)
    own_lse = torch.logsumexp(lse_all[:, rank * rows : (rank + 1) * rows], dim=0)
    return reduce_scatter_rows(out_SBND * share, group), own_lse
