"""FP8 linear layers: scaling and rounding against a table of all FP8 numbers, products against float32."""
import itertools

import pytest
import torch

from megatron_longstraw.mcore.fp8_linear import PRODUCTS, RECIPES, Fp8Linear, emulated_product, quantize, torch_product

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS = [None, (1, 128), (128, 128)]
WAYS = [("tensorwise", "emulated"), ("tensorwise", "torch"), ("blockwise", "emulated")]
LOCAL = dict(bias=None, allreduce_dgrad=False, sequence_parallel=False, tp_group=None)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def nearest(values, dtype):
    """The FP8 number closest to each value, from the list of all of them."""
    table = torch.arange(256).to(torch.uint8).view(dtype).double()
    table = table[table.isfinite()].unique()
    return table[(values.double().reshape(-1, 1) - table).abs().argmin(dim=1)].view(values.shape)


@pytest.mark.parametrize(("dtype", "block"), list(itertools.product((E4M3, E5M2), BLOCKS)))
def test_quantized_values_are_the_nearest_fp8_numbers(dtype, block):
    matrix = randn(130, 200) * torch.logspace(-3, 3, 200)
    result = quantize(matrix, dtype, block)
    rows, columns = block or matrix.shape
    for i, j in itertools.product(range(0, 130, rows), range(0, 200, columns)):
        part = matrix[i : i + rows, j : j + columns].double()
        scale = part.abs().max() / torch.finfo(dtype).max
        if block is not None:
            scale = 2.0 ** torch.ceil(torch.log2(scale))
        expected = nearest(part / scale, dtype) * scale
        actual = result.dequantized()[i : i + rows, j : j + columns].double()
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("dtype", "block"), list(itertools.product((E4M3, E5M2), BLOCKS)))
def test_zero_blocks_give_zeros(dtype, block):
    """L04: the scale of a block of zeros must not be 0 / 0."""
    matrix = randn(256, 256)
    matrix[:128, 128:] = 0
    result = quantize(matrix, dtype, block).dequantized()
    assert torch.equal(result[:128, 128:], torch.zeros(128, 128)) and result.isfinite().all()
    assert torch.equal(quantize(torch.zeros(256, 256), dtype, block).dequantized(), torch.zeros(256, 256))
    tiny = quantize(torch.full((4, 4), 1e-42), dtype, block).dequantized()
    assert tiny.isfinite().all()


@pytest.mark.parametrize(("recipe", "backend"), WAYS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["input", "weight", "grad"])
def test_what_is_not_finite_stays_visible(recipe, backend, bad, where):
    """A conversion that saturates would turn an overflow into 448, and the step would be taken."""
    x, weight, grad = randn(5, 32), randn(16, 32, seed=1), randn(5, 16, seed=2)
    {"input": x, "weight": weight, "grad": grad}[where][0, 0] = bad
    output, dx, dw = run(recipe, backend, x, weight, grad)
    assert not (dx if where == "grad" else output)[0].isfinite().all()
    assert not dw.isfinite().all() or where == "weight"


def run(recipe, backend, x, weight, grad):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    output = Fp8Linear(None, RECIPES[recipe], PRODUCTS[backend])(input=x, weight=weight, **LOCAL)
    output.backward(grad)
    return output.detach(), x.grad, weight.grad


def error(actual, truth):
    return float((actual.float() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("recipe", "backend"), WAYS)
def test_all_three_products_are_in_fp8(recipe, backend, dtype):
    """Their error is that of rounding both operands; e5m2 gradients have one bit less."""
    x, weight, grad = randn(37, 48).to(dtype), randn(32, 48, seed=1).to(dtype), randn(37, 32, seed=2).to(dtype)
    output, dx, dw = run(recipe, backend, x, weight, grad)
    assert {output.dtype, dx.dtype, dw.dtype} == {dtype}
    x, weight, grad = x.float(), weight.float(), grad.float()
    assert 0.02 < error(output, x @ weight.t()) < 0.05
    expected = (0.04, 0.08) if recipe == "tensorwise" else (0.02, 0.05)
    for actual, truth in ((dx, grad @ weight), (dw, grad.t() @ x)):
        assert expected[0] < error(actual, truth) < expected[1]


@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_torch_computes_what_is_emulated(tokens):
    x, weight, grad = randn(tokens, 48), randn(32, 48, seed=1), randn(tokens, 32, seed=2)
    by_torch, emulated = (run("tensorwise", name, x, weight, grad) for name in ("torch", "emulated"))
    for actual, expected in zip(by_torch, emulated):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_row_of_blockwise_depends_on_no_other():
    """So an expert's result for a token does not depend on who else was sent there."""
    x, weight = randn(8, 256), randn(16, 256, seed=1)
    w = quantize(weight, E4M3, (128, 128))
    alone = emulated_product(quantize(x[:1], E4M3, (1, 128)), w, torch.float32)
    x[1:] *= 1000
    together = emulated_product(quantize(x, E4M3, (1, 128)), w, torch.float32)
    torch.testing.assert_close(together[:1], alone, rtol=1e-6, atol=1e-5)


def test_blocks_keep_an_outlier_to_itself():
    """What blockwise is for: one large channel costs its own block of 128 the small bits, not the whole tensor."""
    x, weight = randn(8, 256), randn(16, 256, seed=1)
    x[:, 200] = 1e7
    weight[:, 128:] = 0
    errors = {name: error(run(name, "emulated", x, weight, randn(8, 16))[0], x @ weight.t()) for name in RECIPES}
    assert errors["tensorwise"] > 0.5 and errors["blockwise"] < 0.05


def test_the_backward_reads_what_the_forward_rounded():
    """The gradient belongs to the numbers that were multiplied, not to the unrounded ones."""
    x, weight, grad = randn(20, 32), randn(16, 32, seed=1), randn(20, 16, seed=2)
    _, dx, dw = run("tensorwise", "emulated", x, weight, grad)
    x8, w8, g8 = (quantize(*pair, None).dequantized() for pair in ((x, E4M3), (weight, E4M3), (grad, E5M2)))
    torch.testing.assert_close(dx, g8 @ w8)
    torch.testing.assert_close(dw, g8.t() @ x8)


def test_bias_and_leading_dimensions():
    x, weight, bias = randn(3, 4, 32), randn(16, 32, seed=1), randn(16, seed=2).requires_grad_()
    linear = Fp8Linear(None, RECIPES["tensorwise"], emulated_product)
    output = linear(input=x, weight=weight, **LOCAL | {"bias": bias})
    plain = linear(input=x.view(12, 32), weight=weight, **LOCAL)
    assert torch.equal(output, (plain + bias).view(3, 4, 16))
    output.sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((16,), 12.0))


def test_torch_takes_any_number_of_summed_values():
    """What an expert is sent is no multiple of anything; the CUDA kernel insists on 16."""
    a, b = quantize(randn(16, 21), E4M3, None), quantize(randn(32, 21, seed=1), E4M3, None)
    torch.testing.assert_close(torch_product(a, b, torch.float32), emulated_product(a, b, torch.float32))
