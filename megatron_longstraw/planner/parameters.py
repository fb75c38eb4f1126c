"""Numbers of parameters, of a model and of the ranks that share it."""
from __future__ import annotations

from dataclasses import dataclass

from megatron_longstraw.config import ModelConfig
from megatron_longstraw.planner.shape import LinearAttention, Shape


@dataclass(frozen=True)
class Parameters:
    """Number of parameters, by the ranks that sum their gradients."""

    dense: int
    """Summed over data x context parallel ranks."""
    expert: int = 0
    """Routed experts: summed over the ranks of a stage that hold the same ones."""

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.expert + other.expert)

    def __mul__(self, count: int) -> Parameters:
        return Parameters(self.dense * count, self.expert * count)

    @property
    def total(self) -> int:
        return self.dense + self.expert


def total_parameters(model: ModelConfig, linear: LinearAttention | None = None) -> int:
    """Of the whole model, padded vocabulary rows not counted."""
    model = model.resolve()
    matrices = 2 if model.untie_embeddings_and_output_weights else 1
    layers = _layers(model, linear, model.num_layers)
    return layers.total + model.hidden_size + matrices * model.vocab_size * model.hidden_size


def parameters_of_rank(shape: Shape, stage: int) -> Parameters:
    """On each rank of a pipeline stage (0-based), padded vocabulary rows included, adapters not."""
    model = shape.model
    vocabulary = Parameters(shape.padded_vocab * model.hidden_size)
    first, last = stage == 0, stage == shape.pp - 1
    # A tied head on another stage than the embedding holds a copy of it.
    head = last and (model.untie_embeddings_and_output_weights or not first)
    layers = _layers(model, shape.linear, shape.layers, shape.tp, shape.ep)
    return layers + vocabulary * (first + head) + Parameters(model.hidden_size) * last


def adapter_parameters_of_rank(shape: Shape) -> int:
    """Of a stage's layers: two factors of the rank beside every linear layer; the factor on the side that tensor
    parallelism splits is split with it."""
    if shape.adapter_rank is None:
        return 0
    model, hidden = shape.model, shape.model.hidden_size
    queries, keys = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    linears = [(hidden, queries + 2 * keys), (hidden, queries)]
    linears += [(hidden, 2 * width) for width in _mlp_widths(shape)] + [(hidden, width) for width in _mlp_widths(shape)]
    return shape.layers * shape.adapter_rank * sum(whole + split // shape.tp for whole, split in linears)


def products_of_layer(shape: Shape, rows: int) -> list[tuple[float, float]]:
    """(weights that each row is multiplied with, weights that are read for `rows` rows) of a rank's matrix products of
    one layer, a mean over kinds of layers. Rows are spread evenly over experts."""
    model, hidden = shape.model, shape.model.hidden_size
    mixers = _mixers(model, shape.linear, model.num_layers, shape.tp) / model.num_layers
    out = hidden * shape.query_width
    products = [(mixers - out, mixers - out), (out, out)]
    if model.num_experts is None:
        mlp = hidden * (model.ffn_hidden_size // shape.tp)
        return [*products, (2 * mlp, 2 * mlp), (mlp, mlp)]
    passed = 3 * hidden * sum(_mlp_widths(shape)) / shape.tp
    expert = 3 * hidden * model.moe_ffn_hidden_size
    read = min(model.num_experts / shape.ep, rows * model.moe_router_topk) * expert / (1 if shape.ep > 1 else shape.tp)
    return [*products, (hidden * model.num_experts, hidden * model.num_experts), (passed, read)]


def _mlp_widths(shape: Shape) -> list[int]:
    """Of what one token passes."""
    model = shape.model
    if model.num_experts is None:
        return [model.ffn_hidden_size]
    shared = model.moe_shared_expert_intermediate_size
    return [model.moe_ffn_hidden_size] * model.moe_router_topk + [shared] * (shared is not None)


def _layers(model: ModelConfig, linear: LinearAttention | None, count: int, tp: int = 1, ep: int = 1) -> Parameters:
    hidden = model.hidden_size
    mixers = _mixers(model, linear, count, tp)
    if model.num_experts is None:
        return Parameters(mixers + count * (2 * hidden + 3 * hidden * (model.ffn_hidden_size // tp)))
    dense = 2 * hidden + model.num_experts * hidden
    dense += 3 * hidden * ((model.moe_shared_expert_intermediate_size or 0) // tp)
    # Experts are whole under expert parallelism and cut over tp without it.
    width = model.moe_ffn_hidden_size if ep > 1 else model.moe_ffn_hidden_size // tp
    return Parameters(mixers + count * dense, count * (model.num_experts // ep * 3 * hidden * width))


def _mixers(model: ModelConfig, linear: LinearAttention | None, count: int, tp: int = 1) -> int:
    """Of `count` layers: attention, or a share of linear attention as in the whole model."""
    hidden, channels = model.hidden_size, model.kv_channels
    queries, keys = model.num_attention_heads * channels, model.num_query_groups * channels
    qkv = ((2 if linear else 1) * queries + 2 * keys) // tp
    attention = qkv * hidden + queries // tp * hidden + qkv * model.add_qkv_bias + 2 * channels * model.qk_layernorm
    if linear is None:
        return count * attention
    projections = linear.conv_width + 2 * linear.value_width + 2 * linear.num_value_heads
    own = hidden * projections + linear.conv_width * linear.conv_kernel + 2 * linear.num_value_heads
    recurrent = count * linear.num_layers // model.num_layers
    return (count - recurrent) * attention + recurrent * (own // tp + linear.head_channels)
