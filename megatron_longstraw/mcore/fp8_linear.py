"""A linear layer whose three products (output, input gradient, weight gradient) take FP8 operands.

Scaling is current, never delayed: a scale depends on the tensor at hand alone, so a prompt chunk that runs again gets
the very same numbers. Two recipes, those of Transformer Engine under the same names in Megatron:

    tensorwise  Float8CurrentScaling: one float32 scale per tensor, largest magnitude onto the largest FP8 number;
                e4m3 for inputs and weights, e5m2 for gradients (its HYBRID format)
    blockwise   Float8BlockScaling: one scale, a power of two, per 1 x 128 values along the summed dimension of
                inputs and gradients and per 128 x 128 values of weights; e4m3 for all

Under tensor parallelism a rank scales its own shard of a weight; under sequence parallelism inputs are quantized after
the gather.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
SMALLEST_AMAX = 1e-30
"""Stands in for the magnitude of zeros (0 / 0 would be NaN); its scale and the inverse are normal float32 numbers."""
EXPONENT_BITS = 0x7F800000


@dataclass(frozen=True)
class Recipe:
    """How operands are scaled."""

    gradient_dtype: torch.dtype
    row_block: tuple[int, int] | None
    """Rows and columns of inputs and gradients that share a scale; None: all."""
    weight_block: tuple[int, int] | None

    dtype = torch.float8_e4m3fn
    """Of inputs and weights."""


RECIPES = {
    "tensorwise": Recipe(torch.float8_e5m2, None, None),
    "blockwise": Recipe(torch.float8_e4m3fn, (1, BLOCK), (BLOCK, BLOCK)),
}


@dataclass(frozen=True)
class Quantized:
    """A matrix [m, n] as FP8 `values` [m, n] times float32 `scales`, one per block of the matrix."""

    values: Tensor
    scales: Tensor
    block: tuple[int, int] | None

    def t(self) -> Quantized:
        """The transpose, contiguous. Only for blocks that are as wide as high."""
        return Quantized(self.values.t().contiguous(), self.scales.t().contiguous(), self.block)

    def dequantized(self) -> Tensor:
        """float32 [m, n]"""
        scales = self.scales
        if self.block is not None:
            for dim in (0, 1):
                scales = scales.repeat_interleave(self.block[dim], dim)
            scales = scales[: self.values.shape[0], : self.values.shape[1]]
        return self.values.float() * scales


def quantize(matrix: Tensor, dtype: torch.dtype, block: tuple[int, int] | None) -> Quantized:
    """`matrix` [m, n], not empty, in FP8. Zeros stay zeros; NaN and infinities come back as something not finite."""
    rows, columns = block or matrix.shape
    largest = torch.finfo(dtype).max
    m, n = matrix.shape
    padded = pad(matrix.float(), (0, -n % columns, 0, -m % rows))
    tiles = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    inverse = largest / tiles.abs().amax((1, 3)).clamp(min=SMALLEST_AMAX)
    if block is not None:
        inverse = (inverse.view(torch.int32) & EXPONENT_BITS).view(torch.float32)  # the power of two below
    values = (tiles * inverse[:, None, :, None]).clamp(-largest, largest)
    values = values.view(padded.shape)[:m, :n].contiguous().to(dtype)
    return Quantized(values, 1.0 / inverse, block)


Product = Callable[[Quantized, Quantized, torch.dtype], Tensor]
"""(a [m, k], b [n, k], dtype of the result) -> a b^T [m, n]."""


def emulated_product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Of the numbers that FP8 holds, by an ordinary product in float32. Runs anywhere, saves nothing."""
    return (a.dequantized() @ b.dequantized().t()).to(dtype)


def torch_product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """By `torch._scaled_mm`, which takes one scale per tensor here."""
    # Its CUDA kernel wants multiples of 16; what an expert is sent is any number.
    odd = -a.values.shape[1] % 16
    left, right = (pad(x.values.view(torch.uint8), (0, odd)).view(x.values.dtype) if odd else x.values for x in (a, b))
    return torch._scaled_mm(left, right.t(), scale_a=a.scales, scale_b=b.scales, out_dtype=dtype)


PRODUCTS: dict[str, Product] = {"torch": torch_product, "emulated": emulated_product}


class Fp8Product(torch.autograd.Function):
    """input [tokens, in] x weight [out, in] -> [tokens, out] in the input's dtype; gradients for both.

    `quantized` is the weight in FP8. The backward quantizes the gradient and reads what the forward quantized.
    """

    @staticmethod
    def forward(ctx, input: Tensor, weight: Tensor, quantized: Quantized, recipe: Recipe, product: Product) -> Tensor:
        rows = quantize(input, recipe.dtype, recipe.row_block)
        if ctx.needs_input_grad[1]:
            by_channel = rows if recipe.row_block is None else quantize(input.t(), recipe.dtype, recipe.row_block)
            ctx.save_for_backward(by_channel.values, by_channel.scales)
        ctx.quantized, ctx.recipe, ctx.product, ctx.weight_dtype = quantized, recipe, product, weight.dtype
        return product(rows, quantized, input.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        recipe, grad_input, grad_weight = ctx.recipe, None, None
        rows = quantize(grad, recipe.gradient_dtype, recipe.row_block)
        if ctx.needs_input_grad[0]:
            grad_input = ctx.product(rows, ctx.quantized.t(), grad.dtype)
        if ctx.needs_input_grad[1]:
            by_channel = Quantized(*ctx.saved_tensors, recipe.row_block)
            if recipe.row_block is None:
                by_output, by_channel = rows.t(), by_channel.t()
            else:
                by_output = quantize(grad.t(), recipe.gradient_dtype, recipe.row_block)
            grad_weight = ctx.product(by_output, by_channel, ctx.weight_dtype)
        return grad_input, grad_weight, None, None, None


class Fp8Linear:
    """Takes the place of `_forward_impl` of one of Megatron's parallel linear layers for the length of a call
    (tensor_parallel/layers.py). The weight is quantized once, so it must not change meanwhile."""

    def __init__(self, original: Callable[..., Tensor] | None, recipe: Recipe, product: Product):
        self.original, self.recipe, self.product = original, recipe, product
        self._quantized: Quantized | None = None

    def __call__(self, **options) -> Tensor:
        """By the options of the original: gathers the input over tp, and reduces its gradient, where asked to."""
        input, weight, bias, group = (options[name] for name in ("input", "weight", "bias", "tp_group"))
        if input.numel() == 0:  # an expert without tokens
            return self.original(**options)
        if options["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=group)
        elif options["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input, group=group)
        output = self.multiply(input.reshape(-1, input.shape[-1]), weight).view(*input.shape[:-1], -1)
        return output if bias is None else output + bias

    def multiply(self, input: Tensor, weight: Tensor) -> Tensor:
        """[tokens, in] x [out, in] -> [tokens, out]"""
        recipe = self.recipe
        if self._quantized is None:
            self._quantized = quantize(weight.detach(), recipe.dtype, recipe.weight_block)
        if torch.is_grad_enabled():
            return Fp8Product.apply(input, weight, self._quantized, recipe, self.product)
        return self.product(quantize(input, recipe.dtype, recipe.row_block), self._quantized, input.dtype)
