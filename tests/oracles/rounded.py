"""Rounding of stored keys and values from the formats' definitions, with a straight-through gradient."""
from __future__ import annotations

import torch
from torch import Tensor


def e4m3_values() -> Tensor:
    """The non-negative numbers of float8 e4m3fn in the order of their codes: 4 exponent bits (bias 7), 3 mantissa bits,
    subnormals at exponent 0, the last code NaN."""
    numbers = [
        mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent in range(16)
        for mantissa in range(8)
    ]
    return torch.tensor(numbers[:-1], dtype=torch.float64)


def nearest_e4m3(x: Tensor) -> Tensor:
    """The nearest of these numbers to each |x| <= 448, the one of even code from the middle of two."""
    values = e4m3_values()
    distance = (x.abs().unsqueeze(-1) - values).abs()
    even_first = [*range(0, len(values), 2), *range(1, len(values), 2)]
    return values[even_first][distance[..., even_first].argmin(-1)] * x.sign()


def as_fp8(x: Tensor) -> Tensor:
    """[..., D] -> the same in float64, each row of D rounded to multiples of its own float32 scale."""
    x = x.double()
    scale = (x.abs().amax(-1, keepdim=True).float() / 448).clamp_min(2.0**-126).double()
    return nearest_e4m3(x / scale) * scale


def straight_through(x: Tensor, kv_dtype: str | None) -> Tensor:
    """`x` as it is stored, with the gradient of `x` itself."""
    if kv_dtype is None:
        return x
    rounded = as_fp8(x.detach()) if kv_dtype == "fp8" else x.detach().to(torch.bfloat16)
    return x + (rounded.to(x.dtype) - x.detach())
