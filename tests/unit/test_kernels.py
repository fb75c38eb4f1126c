"""Partial attention and its exact backward, against dense float64 attention and its autograd.

Everything above (merges, shared prefixes, chunked prompts) is exact only if a block's backward, given the GLOBAL out
and lse of the rows, returns exactly that block's share.
"""
import pytest
import torch

from megatron_longstraw.attention.kernels import attend, attend_backward
from tests.oracles.dense_attention import causal, dense_attention
from tests.tolerances import assert_as_good_as, assert_close

SCALE = 0.3
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# batch, query heads, kv heads, queries, keys, head dim
RECTANGLES = [(1, 1, 1, 3, 5, 8), (2, 4, 2, 7, 33, 16), (1, 6, 1, 5, 1, 8), (2, 3, 3, 1, 130, 8), (1, 8, 2, 65, 67, 8)]
SQUARES = [(1, 4, 2, 1, 1, 8), (2, 4, 4, 6, 6, 16), (1, 6, 2, 67, 67, 8)]


def make(shape, dtype=torch.float64, seed=0):
    batch, heads, kv_heads, queries, keys, dim = shape
    generator = torch.Generator().manual_seed(seed)
    query_size, key_size = (batch, heads, queries, dim), (batch, kv_heads, keys, dim)
    sizes = [query_size, key_size, key_size, query_size]  # q, k, v, dout
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def truth(q, k, v, dout, visible, dtype=torch.float64, scale=SCALE):
    """Values and gradients of dense attention computed in `dtype`."""
    q, k, v, dout = (x.detach().to(dtype) for x in (q, k, v, dout))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*leaves, visible, scale)
    grads = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach(), "lse": lse.detach()}, dict(zip(("dq", "dk", "dv"), grads))


def package(q, k, v, dout, is_causal, scale=SCALE):
    out, lse = attend(q, k, v, causal=is_causal, scale=scale)
    grads = attend_backward(dout, q, k, v, out, lse, causal=is_causal, scale=scale)
    return {"out": out, "lse": lse}, dict(zip(("dq", "dk", "dv"), grads))


def check(actual, inputs, visible, dtype):
    for quantity, own, expected, rival in zip(
        ("value", "gradient"), actual, truth(*inputs, visible), truth(*inputs, visible, dtype)
    ):
        if dtype == torch.bfloat16:
            assert_as_good_as(own, rival, expected)
        else:
            assert_close(own, expected, dtype, quantity)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", RECTANGLES)
def test_rectangle(shape, dtype):
    """Every query sees every key; grouped queries read (and send gradient to) their own key-value head."""
    inputs = make(shape, dtype)
    check(package(*inputs, False), inputs, torch.ones(shape[3], shape[4], dtype=torch.bool), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SQUARES)
def test_causal_square(shape, dtype):
    """Row i sees keys 0..i; a mask off by one shows in every row."""
    inputs = make(shape, dtype)
    check(package(*inputs, True), inputs, causal(shape[3], shape[4]), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cuts", [(1,), (4,), (3, 5), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_blocks_with_global_out_and_lse_add_up(cuts, dtype):
    """dq summed over blocks, and each block's own dk, dv, are those of the undivided attention."""
    shape = (2, 4, 2, 5, 9, 8)
    q, k, v, dout = make(shape, dtype)
    expected_values, expected = truth(q, k, v, dout, torch.ones(5, 9, dtype=torch.bool))
    out, lse = (expected_values[name].to(dtype) for name in ("out", "lse"))
    edges = [0, *cuts, 9]
    parts = [
        attend_backward(dout, q, k[:, :, a:b], v[:, :, a:b], out, lse, causal=False, scale=SCALE)
        for a, b in zip(edges, edges[1:])
    ]
    dqs, dks, dvs = zip(*parts)
    own = {"dq": sum(dqs), "dk": torch.cat(dks, dim=2), "dv": torch.cat(dvs, dim=2)}
    assert_close(own, expected, dtype, "gradient")


def test_partial_lse_is_that_of_its_keys_only():
    """The merge needs the natural log of the sum of exp(scale * score) over the block, scale included."""
    q, k, v, _ = make((1, 2, 1, 3, 8, 4))
    _, lse = attend(q, k[:, :, 2:5], v[:, :, 2:5], causal=False, scale=0.7)
    scores = torch.einsum("bnsd,btd->bnst", q, k[:, 0, 2:5]) * 0.7
    assert_close({"lse": lse}, {"lse": scores.exp().sum(-1).log()}, torch.float64, "value")


@pytest.mark.parametrize("scale", [0.01, 1.0, 2.5])
def test_scale_is_the_caller_s(scale):
    """F13: nothing falls back to 1/sqrt(head dim), forward or backward."""
    inputs = make((1, 4, 2, 6, 6, 16))
    values, grads = package(*inputs, True, scale)
    expected_values, expected = truth(*inputs, causal(6, 6), scale=scale)
    assert_close(values, expected_values, torch.float64, "value")
    assert_close(grads, expected, torch.float64, "gradient")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_views_are_read_in_place(dtype):
    """Callers hand in permuted [S, B, N, D] tensors, slices of a longer store, strided lse and expanded dout.

    A kernel that assumed contiguity would read neighbours' numbers without a word."""
    q, k, v, _ = make((2, 4, 2, 6, 6, 8), dtype)
    rows_first = [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (q, k, v)]
    store = [torch.full((2, 2, 11, 8), 9.0, dtype=dtype) for _ in "kv"]
    for buffer, x in zip(store, (k, v)):
        buffer[:, :, 3:9] = x
    dout = torch.ones(1, 1, 1, 1, dtype=dtype).expand(2, 4, 6, 8)
    for q_view, k_view, v_view in (rows_first, [rows_first[0], store[0][:, :, 3:9], store[1][:, :, 3:9]]):
        assert not (q_view.is_contiguous() or k_view.is_contiguous())
        out, lse = attend(q_view, k_view, v_view, causal=True, scale=SCALE)
        lse_view = lse.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        grads = attend_backward(dout, q_view, k_view, v_view, out, lse_view, causal=True, scale=SCALE)
        actual = {"out": out, "lse": lse}, dict(zip(("dq", "dk", "dv"), grads))
        check(actual, (q, k, v, dout), causal(6, 6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    """An lse in bfloat16 would make every merge wrong in its third digit."""
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = make((1, 2, 1, 4, 4, 8), dtype)
    values, grads = package(*inputs, False)
    assert values["lse"].dtype == lse_dtype
    assert values["out"].dtype == dtype
    assert {grad.dtype for grad in grads.values()} == {dtype}


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (0, 0)])
def test_empty_blocks_are_refused(queries, keys):
    """Zero keys would kill the process (SIGFPE) instead of raising."""
    q, k, v, dout = make((1, 2, 1, queries, keys, 8))
    with pytest.raises(AssertionError, match=f"empty attention block: {queries} queries, {keys} keys"):
        attend(q, k, v, causal=False, scale=SCALE)
    with pytest.raises(AssertionError, match="empty attention block"):
        attend_backward(dout, q, k, v, q, q[..., 0], causal=False, scale=SCALE)


def test_causal_blocks_are_squares():
    """Kernels differ in where they anchor the diagonal of a causal rectangle (top left or bottom right)."""
    q, k, v, dout = make((1, 2, 1, 3, 4, 8))
    with pytest.raises(AssertionError, match="3x4 is not square"):
        attend(q, k, v, causal=True, scale=SCALE)
    with pytest.raises(AssertionError, match="3x4 is not square"):
        attend_backward(dout, q, k, v, q, q[..., 0], causal=True, scale=SCALE)


def test_one_head_backward_gives_the_threads_back():
    """The kernel runs on one thread there; a forgotten restore would slow down everything that follows."""
    inputs = make((1, 1, 1, 9, 9, 8))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _, grads = package(*inputs, True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert_close(grads, truth(*inputs, causal(9, 9))[1], torch.float64, "gradient")
