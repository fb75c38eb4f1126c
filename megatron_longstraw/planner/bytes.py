"""Bytes per rank of a run: what is stored, exactly, and what is alive beside it when most is.

Exact means: equal to the tensors of a built model, its gradient buffer, its optimizer and its prefix stores, but for
the distributed optimizer's padding and its uneven shards. The rank counted is the one of a pipeline stage that holds
most: context-parallel rank 0, whose slices are never shorter than its peers'. Configurations must be valid for the
world (see `config.check`).
"""
from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_longstraw.config import Config
from megatron_longstraw.planner.parameters import (
    Parameters,
    adapter_parameters_of_rank,
    parameters_of_rank,
    total_parameters,
)
from megatron_longstraw.planner.shape import FLOAT32, GIB, Shape, shape_of
from megatron_longstraw.planner.tape import PREFIX_GRADIENTS
from megatron_longstraw.planner.working import SAMPLING, Moment, moments

__all__ = [
    "GIB",
    "RankBytes",
    "activation_bytes",
    "bytes_of_rank",
    "bytes_of_shape",
    "fullest_stage",
    "layers_on_device",
    "prefix_bytes",
    "total_parameters",
]


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank's device, and of its share of the host. All but `prefix_graphs` and `fullest` are exact."""

    weights: int
    adapters: int
    gradients: int
    """float32, whole on every rank even with the distributed optimizer."""
    optimizer: int
    """Two float32 moments, and float32 master weights where the model is bfloat16."""
    prefix_kv: int
    """K, V of the prompts of one capture, on the device as all but `host_*`."""
    prefix_boundaries: int
    """Recurrent state at the chunk boundaries of one capture."""
    prefix_attention: int
    """(out, lse) of one capture's chunks that are walked back, kept from capture to the walk."""
    prefix_graphs: int
    """Autograd graphs of the last chunks of all captures: at most these."""
    prefix_grad: int
    """dK, dV of one capture's tokens that are walked back."""
    host_capture: int
    """K, V, out and lse of one capture in host memory."""
    host_grad: int
    """dK, dV of one capture in host memory."""
    host_optimizer: int
    sampling_kv: int
    """K, V of the responses while they are sampled."""
    captures: int
    """Most captures held at once between sampling and update."""
    fullest: Moment
    """When most is alive, and what beside the above; dK, dV and sampling count only where it names them."""

    @property
    def held(self) -> int:
        """Of the prompts, on the device between sampling and update."""
        return self.captures * (self.prefix_kv + self.prefix_boundaries + self.prefix_attention) + self.prefix_graphs

    @property
    def host(self) -> int:
        """The most held at once in host memory."""
        return self.captures * self.host_capture + self.host_grad + self.host_optimizer

    @property
    def total(self) -> int:
        """The most held at once on the device."""
        return self.weights + self.adapters + self.gradients + self.optimizer + self.held + self.fullest.num_bytes

    @property
    def activations(self) -> int:
        """What one micro-batch needs, gathered rows, logits and gradients on their way included."""
        return self.fullest.num_bytes - int(self.fullest.kinds[PREFIX_GRADIENTS] + self.fullest.kinds[SAMPLING])


def bytes_of_rank(config: Config, world_size: int, stage: int = 0) -> RankBytes:
    """Of a rank of this pipeline stage; `rollout.max_prompt_length` None counts as one token (no prefix)."""
    return bytes_of_shape(shape_of(config, world_size), stage)


def fullest_stage(shape: Shape) -> tuple[int, RankBytes]:
    """The pipeline stage whose ranks hold most, and what they hold."""
    of_stages = [bytes_of_shape(shape, stage) for stage in range(shape.pp)]
    stage = max(range(shape.pp), key=lambda stage: of_stages[stage].total)
    return stage, of_stages[stage]


def bytes_of_shape(shape: Shape, stage: int = 0) -> RankBytes:
    parameters, adapters = parameters_of_rank(shape, stage), adapter_parameters_of_rank(shape)
    trained = parameters if shape.adapter_rank is None else Parameters(adapters)
    optimizer, offloaded = _optimizer_bytes(shape, trained), shape.optimizer_cpu_offload
    prefix, sampling_kv = prefix_bytes(shape, stage), _sampling_bytes(shape)
    return RankBytes(
        weights=parameters.total * shape.element_bytes,
        adapters=adapters * shape.element_bytes,
        gradients=trained.total * FLOAT32,
        optimizer=0 if offloaded else optimizer,
        **prefix,
        prefix_graphs=shape.config.prefix.prefix_graph_bytes,
        host_optimizer=optimizer if offloaded else 0,
        sampling_kv=sampling_kv,
        captures=_num_captures(shape),
        fullest=max(moments(shape, stage, prefix["prefix_grad"], sampling_kv), key=lambda moment: moment.num_bytes),
    )


def activation_bytes(config: Config, world_size: int, stage: int) -> int:
    """The most that one micro-batch of a step needs: its tensors, gathered rows, logits and gradients on their way, but
    nothing of what is stored."""
    return max(moment.num_bytes for moment in moments(shape_of(config, world_size), stage, 0, 0))


def prefix_bytes(shape: Shape, stage: int = 0) -> dict[str, int]:
    """The prefix part of `RankBytes`: one capture of `prompts_per_microbatch` longest prompts. No stage holds more than
    the first."""
    _, rows_walked_back = _stored(shape, shape.num_chunks_walked_back)
    prompts, layers = shape.prompts_per_capture, shape.attention_layers
    attending = max(0, layers - shape.shortened_layers(stage))
    row = shape.heads * (shape.model.kv_channels * shape.element_bytes + FLOAT32)
    attention = int(rows_walked_back * prompts * attending * row)
    (kv, kv_layers), (grad, grad_layers) = layers_on_device(shape)
    on_host = round(kv * (layers - kv_layers)) + attention * (shape.out_tier == "host")
    return {
        "prefix_kv": round(kv * kv_layers),
        "prefix_boundaries": _boundary_bytes(shape, prompts),
        "prefix_attention": attention * (shape.out_tier == "device"),
        "prefix_grad": round(grad * grad_layers),
        "host_capture": on_host,
        "host_grad": round(grad * (layers - grad_layers)),
    }


def layers_on_device(shape: Shape) -> tuple[tuple[int, float], tuple[int, float]]:
    """(bytes of a layer, layers that stay on the device) of one capture's K, V, then of their gradients, in the order
    in which they take the room that there is."""
    tokens, (walked_back, _) = _stored(shape, shape.num_chunks)[0], _stored(shape, shape.num_chunks_walked_back)
    of_token = shape.prompts_per_capture * 2 * shape.key_width
    left = (shape.device_bytes or 0) if shape.kv_tier == "host" else math.inf
    found = []
    for of_layer in (round(tokens * of_token * shape.kv_bytes), walked_back * of_token * shape.kv_grad_bytes):
        fitting = shape.attention_layers if left == math.inf or not of_layer else left // of_layer
        found.append((of_layer, min(shape.attention_layers, fitting)))
        left -= of_layer * found[-1][1]
    return found[0], found[1]


def _boundary_bytes(shape: Shape, prompts: int) -> int:
    """Responses start from the prompt's end; each chunk that is walked back starts from a boundary of its own."""
    if shape.linear is None or not shape.prefix_tokens:
        return 0
    records = 1 + shape.num_chunks_walked_back
    layers = shape.linear.num_layers / shape.pp
    return int(prompts * records * layers * shape.linear.state_bytes / (shape.tp * shape.cp))


def _stored(shape: Shape, num_chunks: int) -> tuple[int, int]:
    """(tokens stored, rows with pads) of context-parallel rank 0, of the last chunks."""
    tokens, chunk = shape.prefix_tokens, shape.config.prefix.prefix_chunk_tokens
    rest = tokens % chunk
    lengths = {chunk: num_chunks - (rest > 0 and num_chunks > 0), rest: int(rest > 0 and num_chunks > 0)}
    rows = {length: shape.rows(length, shape.row_multiple) for length in lengths}
    valid = sum(min(length, rows[length]) * count for length, count in lengths.items())
    return valid, sum(rows[length] * count for length, count in lengths.items())


def _optimizer_bytes(shape: Shape, parameters: Parameters) -> int:
    # Averages, and master weights under bf16; an offloaded update needs its gradients on the host too.
    per_parameter = FLOAT32 * (2 + shape.model.bf16 + shape.optimizer_cpu_offload)
    if not shape.config.parallel.use_distributed_optimizer:
        return per_parameter * parameters.total
    of_stage = shape.world_size // shape.pp
    dense = -(-per_parameter * parameters.dense // (of_stage // shape.tp))
    return dense - (-per_parameter * parameters.expert // (of_stage // (shape.ep if shape.ep > 1 else shape.tp)))


def _num_captures(shape: Shape) -> int:
    """All stages keep as many as the one with the largest captures can."""
    largest = prefix_bytes(shape)
    names = ("prefix_kv", "prefix_boundaries", "prefix_attention", "host_capture")
    capture_bytes = sum(largest[name] for name in names)
    batches = -(-shape.prompts_of_update // shape.config.prefix.prompts_per_microbatch)
    budget = shape.config.prefix.prefix_state_budget
    if budget is None or not capture_bytes:
        return batches
    return min(batches, budget // capture_bytes + 1)


def _sampling_bytes(shape: Shape) -> int:
    rollout = shape.config.rollout
    branches = shape.prompts_per_capture * -(-rollout.group_size // shape.cp)
    return int(branches * rollout.max_response_length * shape.kv_elements * shape.element_bytes)
