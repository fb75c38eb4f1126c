"""Parameters by their global name, and weights that do not depend on the layout.

Megatron numbers layers and experts per rank and cuts tensors over tp. Here every local parameter gets the name,
full shape and cut it has in the whole model, so that the same seed gives the same model under any layout, and
gradients of different layouts can be compared.
"""
from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_longstraw.config import ModelConfig

_EMBEDDING = "embedding.word_embeddings.weight"
_HEAD = "output_layer.weight"
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Transformer Engine keeps a norm inside the projection that follows it."""


@dataclass(frozen=True)
class ParameterShard:
    """Where a local parameter sits in the full one."""

    name: str
    """Name in the whole model: global layer and expert numbers (0-based); a tied head is the embedding."""
    full_shape: tuple[int, ...]
    """Shape of the whole, without padded vocabulary rows."""
    partition_dim: int | None
    rank: int
    size: int
    gated: bool
    """Gate and up projections are stacked: each rank holds its slice of both."""
    local_shape: tuple[int, ...]

    @property
    def key(self) -> tuple:
        """Equal for replicas of the same shard."""
        return (self.name, self.rank)

    @property
    def num_unpadded_rows(self) -> int:
        """Local rows that are not padded vocabulary."""
        if self.partition_dim != 0 or self.gated:
            return self.local_shape[0]
        return min(self.local_shape[0], max(0, self.full_shape[0] - self.rank * self.local_shape[0]))

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of a full tensor; rows past its end (padded vocabulary) are zero."""
        if self.partition_dim is None:
            return full
        if self.gated:
            return torch.cat([self._narrow(half) for half in full.chunk(2, dim=0)], dim=0)
        return self._narrow(full)

    def _narrow(self, full: Tensor) -> Tensor:
        dim, length = self.partition_dim, self.local_shape[self.partition_dim]
        if self.gated:
            length //= 2
        begin = self.rank * length
        missing = max(0, (begin + length) - full.shape[dim])
        part = full.narrow(dim, min(begin, full.shape[dim]), max(0, length - missing))
        if missing:
            pad = list(part.shape)
            pad[dim] = length - part.shape[dim]
            part = torch.cat([part, part.new_zeros(pad)], dim=dim)
        return part


def named_shards(chunks: list[GPTModel], model: ModelConfig) -> Iterator[tuple[ParameterShard, torch.nn.Parameter]]:
    """Every local parameter with its place in the whole model."""
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            yield _shard(chunk, local_name, parameter, model), parameter


def _shard(chunk: GPTModel, local_name: str, parameter: torch.nn.Parameter, model: ModelConfig) -> ParameterShard:
    name = _global_name(chunk, local_name)
    sharded = getattr(parameter, "tensor_model_parallel", False)
    expert = ".experts." in name
    tp_size, tp_rank = 1, 0
    if sharded and expert:
        tp_size = parallel_state.get_expert_tensor_parallel_world_size()
        tp_rank = parallel_state.get_expert_tensor_parallel_rank()
    elif sharded:
        tp_size = parallel_state.get_tensor_model_parallel_world_size()
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
    dim = parameter.partition_dim if sharded else None
    shape = list(parameter.shape)
    if dim is not None:
        shape[dim] *= tp_size
    if name in (_EMBEDDING, _HEAD):
        shape[0] = model.vocab_size
    gated = dim == 0 and name.endswith("linear_fc1.weight")
    return ParameterShard(name, tuple(shape), dim, tp_rank, tp_size, gated, tuple(parameter.shape))


def _global_name(chunk: GPTModel, local_name: str) -> str:
    if local_name == _HEAD and chunk.share_embeddings_and_output_weights:
        return _EMBEDDING

    def layer(match: re.Match) -> str:
        return f"layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}."

    def expert(match: re.Match) -> str:
        per_rank = chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        return f"local_experts.{int(match[1]) + per_rank * parallel_state.get_expert_model_parallel_rank()}."

    for fused, plain in _FUSED_NORMS.items():
        local_name = local_name.replace(fused, plain)
    name = re.sub(r"layers\.(\d+)\.", layer, local_name)
    return re.sub(r"local_experts\.(\d+)\.", expert, name)


def initialize_weights(chunks: list[GPTModel], model: ModelConfig, seed: int) -> None:
    """Megatron's initial distribution (normal, output projections scaled by 1/sqrt(2 L)), drawn per global name."""
    for shard, parameter in named_shards(chunks, model):
        with torch.no_grad():
            parameter.copy_(shard.cut(initial_weight(shard.name, shard.full_shape, model, seed)))


def initial_weight(name: str, full_shape: tuple[int, ...], model: ModelConfig, seed: int) -> Tensor:
    """float32 initial value of a whole parameter."""
    if name.endswith("norm.weight"):
        return torch.ones(full_shape)
    if name.endswith(".bias"):
        return torch.zeros(full_shape)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    std = model.init_method_std
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        std /= math.sqrt(2 * model.num_layers)
    return torch.randn(full_shape, generator=generator) * std
