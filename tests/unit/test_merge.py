"""The log-sum-exp merge: any split of the keys, in any order, gives the attention over all of them."""
import itertools
import math

import pytest
import torch

from megatron_longstraw.attention.merge import AttentionAccumulator, accumulation_dtype
from tests.oracles.dense_attention import dense_attention
from tests.tolerances import FLOAT32_ROUNDING, RELATIVE, assert_close, relative_error

ROWS, BATCH, HEADS, DIM, KEYS = 4, 2, 3, 5, 10
EVERYTHING = slice(0, ROWS)


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(BATCH, HEADS, ROWS, DIM, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(BATCH, HEADS, KEYS, DIM, generator=generator, dtype=torch.float64) for _ in "kv")
    return q, k, v


def partial(q, k, v, keys):
    """Dense attention over some keys, as out [S, B, N, D] and lse [S, B, N]."""
    visible = torch.ones(q.shape[2], len(keys), dtype=torch.bool)
    out, lse = dense_attention(q, k[:, :, keys], v[:, :, keys], visible, 0.6)
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def merged(parts, dtype=torch.float64):
    acc = AttentionAccumulator(torch.empty(ROWS, BATCH, HEADS, DIM, dtype=dtype))
    for out, lse in parts:
        acc.add(EVERYTHING, out, lse)
    return {"out": acc.out_SBND, "lse": acc.lse_SBN}


def whole(seed=0):
    return dict(zip(("out", "lse"), partial(*tensors(seed), list(range(KEYS)))))


SPLITS = [[list(range(10))], [[0], list(range(1, 10))], [[9, 0, 5], [1, 2, 3, 4], [6, 8, 7]], [[i] for i in range(10)]]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_any_split_in_any_order(split, dtype):
    """Ranks and blocks arrive in whatever order they do; the result may not depend on it."""
    orders = list(itertools.permutations(split)) if len(split) < 5 else [split, split[::-1]]
    for order in orders:
        parts = [[x.to(dtype) for x in partial(*tensors(), keys)] for keys in order]
        assert_close(merged(parts, dtype), whole(), dtype, "value")


def test_rows_a_block_does_not_cover_stay_as_they_are():
    """A later rank's own rows meet only later queries; the others must keep bits and must not become NaN."""
    q, k, v = tensors()
    acc = AttentionAccumulator(torch.empty(ROWS, BATCH, HEADS, DIM, dtype=torch.float64))
    late = slice(2, ROWS)
    acc.add(late, *partial(q[:, :, late], k, v, [3, 4]))
    assert torch.equal(acc.lse_SBN[:2], torch.full((2, BATCH, HEADS), -math.inf, dtype=torch.float64))
    assert torch.equal(acc.out_SBND[:2], torch.zeros(2, BATCH, HEADS, DIM, dtype=torch.float64))
    rest = [i for i in range(KEYS) if i not in (3, 4)]
    acc.add(EVERYTHING, *partial(q, k, v, rest))
    expected = whole()
    assert_close({"out": acc.out_SBND[late]}, {"out": expected["out"][late]}, torch.float64, "value")
    early = dict(zip(("out", "lse"), partial(q[:, :, :2], k, v, rest)))
    assert_close({"out": acc.out_SBND[:2], "lse": acc.lse_SBN[:2]}, early, torch.float64, "value")


@pytest.mark.parametrize(
    "lses", [(1000.0, 999.0), (-1000.0, -1001.0), (3e4, -3e4), (-3e4, 3e4), (1e4, 1e4), (-1e4, -1e4)]
)
def test_extreme_lse(lses):
    """exp of a raw lse over- or underflows float32 from 89 on; long prompts with sharp heads get there."""
    shape = (ROWS, BATCH, HEADS, DIM)
    outs = [torch.full(shape, value) for value in (2.0, 5.0)]
    actual = merged([(out, torch.full(shape[:3], lse)) for out, lse in zip(outs, lses)], torch.float32)
    top = max(lses)
    shares = [math.exp(max(lse - top, -800.0)) for lse in lses]
    expected = (2.0 * shares[0] + 5.0 * shares[1]) / sum(shares)
    expected_lse = top + math.log(sum(shares))
    assert relative_error(actual["lse"], torch.full(shape[:3], expected_lse)) <= RELATIVE[torch.float32, "value"]
    limit = RELATIVE[torch.float32, "value"] + FLOAT32_ROUNDING * abs(expected_lse)
    assert relative_error(actual["out"], torch.full(shape, expected)) <= limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_are_kept_in_float32_at_least(dtype):
    """A merge in bfloat16 loses a block of 1/256 of the mass altogether."""
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    acc = AttentionAccumulator(torch.empty(ROWS, BATCH, HEADS, DIM, dtype=dtype))
    assert accumulation_dtype(dtype) == acc.out_SBND.dtype == acc.lse_SBN.dtype == expected


def test_many_bfloat16_blocks_do_not_drift():
    """256 equal blocks of one value: a running sum in bfloat16 would stop growing half way."""
    shape = (ROWS, BATCH, HEADS, DIM)
    block = torch.ones(shape, dtype=torch.bfloat16), torch.zeros(shape[:3])
    actual = merged([block] * 256, torch.bfloat16)
    limit = FLOAT32_ROUNDING * 256
    assert relative_error(actual["out"], torch.ones(shape)) <= limit
    assert relative_error(actual["lse"], torch.full(shape[:3], math.log(256.0))) <= limit
