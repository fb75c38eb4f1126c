"""Bytes per rank of a run. What is stored is counted exactly, activations are estimated.

Exact means: equal to the tensors of a built model, its gradient buffer, its optimizer and its prefix stores, but for
the distributed optimizer's padding and its uneven shards. The rank counted is the one of a pipeline stage that holds
most: context-parallel rank 0, whose slices are never shorter than its peers'. Configurations must be valid for the
world (see `config.check`).
"""
from __future__ import annotations

from dataclasses import dataclass

from megatron_longstraw.config import Config, ModelConfig

FLOAT32 = 4
GIB = 2**30


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


def total_parameters(model: ModelConfig) -> int:
    """Of the whole model, padded vocabulary rows not counted."""
    model = model.resolve()
    matrices = 2 if model.untie_embeddings_and_output_weights else 1
    layers = _layer(model) * model.num_layers
    return layers.total + model.hidden_size + matrices * model.vocab_size * model.hidden_size


def parameters_of_rank(config: Config, stage: int) -> Parameters:
    """Parameters on each rank of a pipeline stage (0-based), padded vocabulary rows included."""
    config = config.resolve()
    model, parallel = config.model, config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    layers = _layer(model, tp, parallel.expert_model_parallel_size) * (model.num_layers // pp)
    vocabulary = Parameters(model.padded_vocab_size(tp) // tp * model.hidden_size)
    first, last = stage == 0, stage == pp - 1
    # A tied head on another stage than the embedding holds a copy of it.
    head = last and (model.untie_embeddings_and_output_weights or not first)
    return layers + vocabulary * (first + head) + Parameters(model.hidden_size) * last


def _layer(model: ModelConfig, tp: int = 1, ep: int = 1) -> Parameters:
    hidden, channels = model.hidden_size, model.kv_channels
    queries, keys = model.num_attention_heads * channels, model.num_query_groups * channels
    qkv = (queries + 2 * keys) // tp
    dense = 2 * hidden + qkv * hidden + queries // tp * hidden
    dense += qkv * model.add_qkv_bias + 2 * channels * model.qk_layernorm
    if model.num_experts is None:
        return Parameters(dense + 3 * hidden * (model.ffn_hidden_size // tp))
    dense += model.num_experts * hidden + 3 * hidden * ((model.moe_shared_expert_intermediate_size or 0) // tp)
    # Experts are whole under expert parallelism and cut over tp without it.
    width = model.moe_ffn_hidden_size if ep > 1 else model.moe_ffn_hidden_size // tp
    return Parameters(dense, model.num_experts // ep * 3 * hidden * width)


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank. All but `activations` and `prefix_graphs` are exact."""

    weights: int
    gradients: int
    """float32, whole on every rank even with the distributed optimizer."""
    optimizer: int
    """Two float32 moments, and float32 master weights where the model is bfloat16."""
    prefix_kv: int
    """K, V of the prompts of one capture, on the device as all but `host_*`."""
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
    sampling_kv: int
    """K, V of the responses while they are sampled."""
    captures: int
    """Most captures held at once between sampling and update."""
    activations: int
    """Estimate of what one micro-batch (a chunk or a pack of responses) needs under autograd."""

    @property
    def total(self) -> int:
        """The most held at once: sampling ends before dK, dV and activations appear."""
        stored = self.weights + self.gradients + self.optimizer
        held = self.captures * (self.prefix_kv + self.prefix_attention) + self.prefix_graphs
        return stored + held + max(self.sampling_kv, self.prefix_grad + self.activations)

    @property
    def host(self) -> int:
        """The most held at once in host memory."""
        return self.captures * self.host_capture + self.host_grad


def bytes_of_rank(config: Config, world_size: int, stage: int = 0) -> RankBytes:
    """Of a rank of this pipeline stage; `rollout.max_prompt_length` None counts as one token (no prefix)."""
    config = config.resolve()
    parameters, element = parameters_of_rank(config, stage), _element_bytes(config)
    return RankBytes(
        weights=parameters.total * element,
        gradients=parameters.total * FLOAT32,
        optimizer=_optimizer_bytes(config, world_size, parameters),
        **prefix_bytes(config, world_size, stage),
        prefix_graphs=config.prefix.prefix_graph_bytes,
        sampling_kv=_sampling_bytes(config, world_size),
        captures=_num_captures(config, world_size),
        activations=activation_bytes(config, world_size, stage),
    )


def prefix_bytes(config: Config, world_size: int, stage: int = 0) -> dict[str, int]:
    """The prefix part of `RankBytes`: one capture of `prompts_per_microbatch` longest prompts. No stage holds more than
    the first."""
    config = config.resolve()
    model, prefix = config.model, config.prefix
    sizes = _chunk_sizes(config)
    walked_back = sizes[len(sizes) - prefix.num_chunks_walked_back(len(sizes)) :]
    prompts, layers = _prompts_per_capture(config, world_size), _layers(config)
    row = model.num_attention_heads // config.parallel.tensor_model_parallel_size
    row *= model.kv_channels * _element_bytes(config) + FLOAT32
    attention = sum(rows for _, rows in walked_back) * prompts * _attending_layers(config, stage) * row
    # Of one layer.
    kv = sum(valid for valid, _ in sizes) * prompts * _stored_token_bytes(config)
    grad = sum(valid for valid, _ in walked_back) * prompts * _kv_elements(config) // layers
    grad *= {"fp32": FLOAT32, "bf16": 2}[prefix.prefix_grad_dtype]
    kv_device = _fitting(layers, kv, prefix.prefix_device_bytes)
    left = None if prefix.prefix_device_bytes is None else prefix.prefix_device_bytes - kv_device
    grad_device = _fitting(layers, grad, left)
    return {
        "prefix_kv": kv_device,
        "prefix_attention": attention * (prefix.prefix_out_tier == "device"),
        "prefix_grad": grad_device,
        "host_capture": layers * kv - kv_device + attention * (prefix.prefix_out_tier == "host"),
        "host_grad": layers * grad - grad_device,
    }


def _fitting(layers: int, of_layer: int, limit: int | None) -> int:
    """Bytes of as many whole layers as fit."""
    return layers * of_layer if limit is None or not of_layer else min(layers, limit // of_layer) * of_layer


def _stored_token_bytes(config: Config) -> int:
    """K and V of one token in one layer of a rank, as the prefix state keeps them."""
    elements, kv_dtype = _kv_elements(config) // _layers(config), config.prefix.prefix_kv_dtype
    if kv_dtype == "fp8":
        return elements + elements // config.model.kv_channels * FLOAT32  # codes, and a scale per head
    return elements * (2 if kv_dtype == "bf16" else _element_bytes(config))


def _chunk_sizes(config: Config) -> list[tuple[int, int]]:
    """(tokens stored, rows with pads) of context-parallel rank 0, by chunk; the last prompt token goes with the
    responses."""
    if config.prefix.schedule == "full":
        return []
    prefix_tokens, chunk = (config.rollout.max_prompt_length or 1) - 1, config.prefix.prefix_chunk_tokens
    lengths = [min(chunk, prefix_tokens - start) for start in range(0, prefix_tokens, chunk)]
    return [(min(length, _rows(config, length)), _rows(config, length)) for length in lengths]


def _rows(config: Config, num_tokens: int) -> int:
    """Rows per rank inside the matmuls, pads included."""
    return config.rows_of_rank(num_tokens) * _sequence_split(config)


def _sequence_split(config: Config) -> int:
    """Ranks that share the rows of one rank outside the matmuls."""
    return config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1


def _element_bytes(config: Config) -> int:
    return 2 if config.model.bf16 else 4


def _layers(config: Config) -> int:
    return config.model.num_layers // config.parallel.pipeline_model_parallel_size


def _attending_layers(config: Config, stage: int) -> int:
    """Layers of a stage through which a prompt chunk goes whole: of the model's last layer it needs K, V only."""
    return _layers(config) - (stage == config.parallel.pipeline_model_parallel_size - 1)


def _kv_elements(config: Config) -> int:
    """K and V of one token in all layers of a rank."""
    groups = config.model.num_query_groups // config.parallel.tensor_model_parallel_size
    return _layers(config) * 2 * groups * config.model.kv_channels


def _replicas(config: Config, world_size: int) -> int:
    """Data parallel size."""
    parallel = config.parallel
    sizes = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.context_parallel_size)
    return world_size // (sizes[0] * sizes[1] * sizes[2])


def _prompts_of_update(config: Config, world_size: int) -> int:
    """Of one replica."""
    return -(-config.algorithm.ppo_mini_batch_size // _replicas(config, world_size))


def _prompts_per_capture(config: Config, world_size: int) -> int:
    return min(config.prefix.prompts_per_microbatch, _prompts_of_update(config, world_size))


def _optimizer_bytes(config: Config, world_size: int, parameters: Parameters) -> int:
    per_parameter = FLOAT32 * (3 if config.model.bf16 else 2)
    if not config.parallel.use_distributed_optimizer:
        return per_parameter * parameters.total
    parallel = config.parallel
    ep, tp = parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    of_stage = world_size // parallel.pipeline_model_parallel_size
    dense = -(-per_parameter * parameters.dense // (of_stage // tp))
    return dense - (-per_parameter * parameters.expert // (of_stage // (ep if ep > 1 else tp)))


def _num_captures(config: Config, world_size: int) -> int:
    """All stages keep as many as the one with the largest captures can."""
    largest = prefix_bytes(config, world_size)
    capture_bytes = sum(largest[name] for name in ("prefix_kv", "prefix_attention", "host_capture"))
    batches = -(-_prompts_of_update(config, world_size) // config.prefix.prompts_per_microbatch)
    budget = config.prefix.prefix_state_budget
    if budget is None or not capture_bytes:
        return batches
    return min(batches, budget // capture_bytes + 1)


def _sampling_bytes(config: Config, world_size: int) -> int:
    rollout, cp = config.rollout, config.parallel.context_parallel_size
    branches = _prompts_per_capture(config, world_size) * -(-rollout.group_size // cp)
    return branches * rollout.max_response_length * _kv_elements(config) * _element_bytes(config)


def activation_bytes(config: Config, world_size: int, stage: int) -> int:
    """Of the largest micro-batch, and one chunk of the head with its gradient."""
    parallel, prefix = config.parallel, config.prefix
    tp, (chunk_rows, response_rows) = parallel.tensor_model_parallel_size, _microbatch_rows(config, world_size)
    walked_back = 0 if prefix.prefix_grad == "frozen" else _attending_layers(config, stage)
    mlp_rows = chunk_rows
    if prefix.prefix_mlp_block_tokens is not None:
        mlp_rows = _prompts_per_capture(config, world_size) * prefix.prefix_mlp_block_tokens * _sequence_split(config)
    of_chunk = _microbatch_bytes(config, chunk_rows, walked_back, min(mlp_rows, chunk_rows))
    of_responses = _microbatch_bytes(config, response_rows, _layers(config), response_rows)
    head_rows = min(prefix.log_probs_chunk_size, response_rows * parallel.context_parallel_size)
    head = 2 * FLOAT32 * head_rows * config.model.padded_vocab_size(tp) // tp
    return int(max(of_chunk, of_responses)) + head


def _microbatch_bytes(config: Config, rows: int, layers: int, mlp_rows: int) -> float:
    """What that many layers keep of the rows for backward (their inputs under full recompute) and one layer more, with
    the MLP of `mlp_rows` at once; and the gathered rows of one attention."""
    model, parallel, element = config.model, config.parallel, _element_bytes(config)
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    hidden = model.hidden_size / _sequence_split(config)
    queries, keys = (count * model.kv_channels / tp for count in (model.num_attention_heads, model.num_query_groups))
    ffn = model.ffn_hidden_size / tp
    if model.num_experts is not None:
        ffn = model.moe_router_topk * model.moe_ffn_hidden_size + (model.moe_shared_expert_intermediate_size or 0) / tp
    attention, mlp, held = 2 * hidden + 3 * queries + 3 * keys, 2 * hidden + 4 * ffn, mlp_rows
    if mlp_rows < rows:  # the blocks' input stays, the rest is computed again
        attention, held = attention + hidden, 0
    of_layer = rows * hidden if parallel.recompute_granularity else rows * attention + held * mlp
    one_more = rows * attention + mlp_rows * mlp
    in_flight = parallel.pipeline_model_parallel_size
    return element * (layers * of_layer * in_flight + one_more) + rows * cp * queries * (3 * element + 2 * FLOAT32)


def _microbatch_rows(config: Config, world_size: int) -> tuple[int, int]:
    """Rows per rank of a chunk, and of a pack of responses (of whole sequences under --schedule full)."""
    prefix, rollout = config.prefix, config.rollout
    longest, response_tokens = rollout.max_prompt_length, rollout.max_response_length
    if prefix.schedule == "full":
        return 0, _rows(config, (longest or 1) + response_tokens)
    chunk = _rows(config, min(prefix.prefix_chunk_tokens, longest or prefix.prefix_chunk_tokens))
    responses = min(prefix.branches_per_microbatch, rollout.group_size) * _rows(config, response_tokens)
    prompts = _prompts_per_capture(config, world_size)
    return prompts * chunk, prompts * responses
