"""Collectives along the rows, and the merge of partial attentions over ranks."""
import pytest
import torch
import torch.distributed as dist

from megatron_longstraw.context_parallel.collectives import (
    all_gather_rows,
    group_rank,
    group_size,
    merge_over_ranks,
    reduce_scatter_rows,
)
from tests.distributed.launch import run_ranks
from tests.oracles.dense_attention import dense_attention
from tests.tolerances import RELATIVE, assert_close, relative_error

pytestmark = pytest.mark.dist

WORLD = 3
ROWS, BATCH, HEADS, DIM = 6, 2, 3, 4
KEYS = {0: [0, 4], 1: [], 2: [1, 2, 3]}
"""Keys by rank; rank 1 holds none (a prefix shorter than the ranks)."""


def numbers(rank, rows):
    return torch.randn(rows, 2, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def attention_tensors():
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(BATCH, HEADS, n, DIM, generator=generator, dtype=torch.float64) for n in (ROWS, 5, 5)]


def partial(q, k, v, keys, num_rows):
    """Rows [0, num_rows) attend to `keys`; the rest, and everything without keys, has seen nothing."""
    out = torch.zeros(ROWS, BATCH, HEADS, DIM, dtype=torch.float64)
    lse = torch.full((ROWS, BATCH, HEADS), float("-inf"), dtype=torch.float64)
    if keys:
        visible = torch.ones(num_rows, len(keys), dtype=torch.bool)
        o, l = dense_attention(q[:, :, :num_rows], k[:, :, keys], v[:, :, keys], visible, 0.5)
        out[:num_rows], lse[:num_rows] = o.permute(2, 0, 1, 3), l.permute(2, 0, 1)
    return out, lse


def work(rank):
    group = dist.group.WORLD
    q, k, v = attention_tensors()
    # Rank 2's keys are invisible to the last row, as a later rank's causal rows are.
    part = partial(q, k, v, KEYS[rank], ROWS - 1 if rank == 2 else ROWS)
    strided = numbers(rank, 2).transpose(0, 1).contiguous().transpose(0, 1)
    return {
        "size and rank": (group_size(group), group_rank(group)),
        "gathered": all_gather_rows(numbers(rank, 2), group),
        "gathered strided": all_gather_rows(strided, group),
        "scattered": reduce_scatter_rows(numbers(rank, 2 * WORLD), group),
        "merged": merge_over_ranks(*part, group),
    }


@pytest.fixture(scope="module")
def results():
    return run_ranks(work, WORLD)


def test_gather_stacks_ranks_in_order(results):
    """Another order would pair rows with foreign positions."""
    expected = torch.cat([numbers(rank, 2) for rank in range(WORLD)])
    for rank, result in enumerate(results):
        assert result["size and rank"] == (WORLD, rank)
        assert torch.equal(result["gathered"], expected)
        assert torch.equal(result["gathered strided"], expected)


def test_reduce_scatter_is_the_transpose_of_gather(results):
    """Every rank gets the sum of its own rows: the query gradient of the rows it owns."""
    total = sum(numbers(rank, 2 * WORLD) for rank in range(WORLD))
    for rank, result in enumerate(results):
        assert relative_error(result["scattered"], total[2 * rank : 2 * rank + 2]) <= RELATIVE[torch.float64, "value"]


def test_merge_over_ranks_is_attention_over_all_keys(results):
    """Every rank gets its own rows of the attention over everybody's keys; a rank without keys contributes nothing
    (and no NaN), and rows that do not see a rank are not touched by it."""
    q, k, v = attention_tensors()
    visible = torch.ones(ROWS, 5, dtype=torch.bool)
    visible[-1, KEYS[2]] = False
    out, lse = dense_attention(q, k, v, visible, 0.5)
    out, lse = out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)
    for rank, result in enumerate(results):
        own = slice(2 * rank, 2 * rank + 2)
        actual = dict(zip(("out", "lse"), result["merged"]))
        assert_close(actual, {"out": out[own], "lse": lse[own]}, torch.float64, "value")


@pytest.mark.parametrize("collective", [all_gather_rows, reduce_scatter_rows])
def test_one_rank_passes_through(collective):
    """Without context parallelism there is no copy and no process group."""
    rows = numbers(0, 2)
    assert collective(rows, None) is rows
    assert (group_size(None), group_rank(None)) == (1, 0)
    out, lse = merge_over_ranks(rows, rows[..., 0], None)
    assert out is rows
