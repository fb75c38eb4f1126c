"""FP8 for the prompt passes: the linear layers of the transformer layers in capture and prefix backward.

Replay, score, sampling, the LM head, embeddings, router and attention stay in the model's dtype. Three backends:

    te        Transformer Engine's layers under Megatron's own context, which every transformer block enters anew on
              each forward (transformer/transformer_block.py:717-760)
    torch     Megatron's local layers with `torch._scaled_mm` (see fp8_linear.py)
    emulated  the same rounding and scaling, then ordinary products: what FP8 does to the numbers, on any device

A chunk that runs again in the prefix backward is scaled by the same rule on the same rows, so its K, V equal the stored
ones to the last bit. With `tensorwise`, everything in a micro-batch shares the scale (prompts that are captured
together, pads too); with `blockwise` a row's result does not depend on the others.
"""
from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Iterator

import torch
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_longstraw.config import Config, ConfigError
from megatron_longstraw.mcore.fp8_linear import BLOCK, PRODUCTS, RECIPES, Fp8Linear
from megatron_longstraw.mcore.model import transformer_config, uses_transformer_engine
from megatron_longstraw.mcore.parallel import Layout

ALIGNMENT_TOKENS = {"te": 16, "torch": 16, "emulated": 1}
"""Rows that a linear layer takes come in multiples of this."""
FORMATS = {"tensorwise": "hybrid", "blockwise": "e4m3"}
"""Megatron's name of the number formats that Transformer Engine's recipe has by default."""
TRIAL_ERRORS = (0.01, 0.2)
"""Bounds of ||error|| / ||result|| of an FP8 product of normal numbers (0.03 to 0.06; of a bfloat16 one: 0.002)."""


@dataclass(frozen=True)
class PrefixFp8:
    """FP8 as one run uses it."""

    recipe: str
    backend: str

    def describe(self) -> str:
        return f"prompt passes in FP8 ({self.recipe}, {self.backend})"

    def row_multiple(self, layout: Layout) -> int:
        """Rows of a rank in a prompt pass must be a multiple of this."""
        if self.backend == "te" and layout.sequence_parallel:
            # Each rank's share is quantized by itself before it is gathered, and in whole blocks.
            return layout.tp_size * (BLOCK if self.recipe == "blockwise" else ALIGNMENT_TOKENS["te"])
        return math.lcm(layout.row_multiple, ALIGNMENT_TOKENS[self.backend])

    @contextlib.contextmanager
    def switched_on(self, chunks: list[GPTModel]) -> Iterator[None]:
        """For the length of a call, backward and activation recompute included."""
        with contextlib.ExitStack() as stack:
            for chunk in chunks:
                stack.enter_context(self._engine(chunk.config) if self.backend == "te" else self._local(chunk))
            yield

    @contextlib.contextmanager
    def _engine(self, config: TransformerConfig) -> Iterator[None]:
        before = config.fp8, config.fp8_recipe
        config.fp8, config.fp8_recipe = FORMATS[self.recipe], self.recipe
        try:
            yield
        finally:
            config.fp8, config.fp8_recipe = before

    @contextlib.contextmanager
    def _local(self, chunk: GPTModel) -> Iterator[None]:
        kinds = (ColumnParallelLinear, RowParallelLinear)
        linears = [module for module in chunk.decoder.layers.modules() if isinstance(module, kinds)]
        for linear in linears:
            linear._forward_impl = Fp8Linear(linear._forward_impl, RECIPES[self.recipe], PRODUCTS[self.backend])
        try:
            yield
        finally:
            for linear in linears:
                del linear._forward_impl  # the class's own shows again


def choose(config: Config, device: torch.device) -> PrefixFp8 | None:
    """What a resolved configuration asks for, tried once on this device; None where it is off.

    Raises:
        ConfigError: this device, or what is installed, cannot do it.
    """
    prefix = config.prefix
    if prefix.fp8_prefix == "off":
        return None
    engine, backend = uses_transformer_engine(config.model), prefix.fp8_backend
    if backend == "auto":
        backend = "te" if engine else "torch" if device.type == "cuda" else "emulated"
    asked = f"--fp8-prefix {prefix.fp8_prefix} with --fp8-backend {backend}"
    if backend == "te" and prefix.prefix_mlp_block_tokens is not None:
        # Blocks run again by Megatron's own checkpoint, outside its FP8 context.
        raise ConfigError([
            f"{asked} would run --prefix-mlp-block-tokens {prefix.prefix_mlp_block_tokens} again without FP8; leave that "
            "out, or change --fp8-backend"
        ])  # fmt: skip
    if backend == "te" and not engine:
        needs = "a CUDA device, the transformer_engine package and --transformer-impl auto"
        raise ConfigError([f"{asked} needs Transformer Engine's layers: {needs}; change --fp8-backend"])
    if backend != "te" and engine:
        raise ConfigError([f"{asked} quantizes Megatron's local layers; change --transformer-impl to local"])
    if backend == "torch" and prefix.fp8_prefix != "tensorwise":
        raise ConfigError([f"{asked}: torch runs tensorwise only; change --fp8-prefix or --fp8-backend (te, emulated)"])
    chosen = PrefixFp8(prefix.fp8_prefix, backend)
    try:
        errors = _trial_errors(chosen, transformer_config(config), device)
    except (ImportError, RuntimeError, ValueError, AssertionError) as problem:
        reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise ConfigError(
            [f"{asked} does not run on this device ({reason}); change --fp8-prefix or --fp8-backend"]
        ) from None
    low, high = TRIAL_ERRORS
    if not all(low < error < high for error in errors):
        got = ", ".join(f"{error:.1e}" for error in errors)
        raise ConfigError(
            [
                f"{asked}: trial products are off by {got}, need errors of FP8, between {low:g} and {high:g}; "
                "change --fp8-prefix or --fp8-backend"
            ]
        )
    return chosen


def _trial_errors(chosen: PrefixFp8, config: TransformerConfig, device: torch.device) -> list[float]:
    """Relative errors of a small linear layer's output and two gradients."""
    generator, dtype = torch.Generator().manual_seed(0), config.params_dtype
    shapes = (32, BLOCK), (BLOCK, BLOCK), (32, BLOCK)
    x, weight, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    exact = [(a.float() @ b.float()) for a, b in ((x, weight.t()), (grad, weight), (grad.t(), x))]
    x, weight = x.requires_grad_(), torch.nn.Parameter(weight)
    if chosen.backend == "te":
        import transformer_engine.pytorch as te

        layer = te.Linear(BLOCK, BLOCK, bias=False, params_dtype=dtype, device=device, init_method=lambda _: None)
        layer.weight.data.copy_(weight)
        weight = layer.weight
        with chosen._engine(config), get_fp8_context(config):
            output = layer(x)
    else:
        output = Fp8Linear(None, RECIPES[chosen.recipe], PRODUCTS[chosen.backend]).multiply(x, weight)
    output.backward(grad)
    results = output.detach(), x.grad, weight.grad
    return [float((actual.float() - truth).norm() / truth.norm()) for actual, truth in zip(results, exact)]
