"""Our configuration as a Megatron-Core GPTModel, with our core attention in its layer spec."""
from __future__ import annotations

import importlib.util

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_longstraw.config import Config, ConfigError, ModelConfig
from megatron_longstraw.mcore import cpu_runtime
from megatron_longstraw.mcore.core_attention import BranchCoreAttention
from megatron_longstraw.mcore.layer import BranchLayer
from megatron_longstraw.mcore.normalization import TorchRMSNorm
from megatron_longstraw.mcore.parallel import expert_tensor_parallel_size
from megatron_longstraw.mcore.rotary import OffsetRotary, llama3_inv_freq

_YARN_FIELDS = (
    "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_mscale",
    "yarn_mscale_all_dim",
)


def uses_transformer_engine(model: ModelConfig) -> bool:
    """Whether the Transformer Engine spec is built.

    Raises:
        ConfigError: it was asked for and cannot run here.
    """
    available = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    if model.transformer_impl == "transformer_engine" and not available:
        raise ConfigError(
            [
                "--transformer-impl transformer_engine needs a CUDA device and the transformer_engine package "
                "(pip install 'megatron_longstraw[te]'); use --transformer-impl local"
            ]
        )
    return model.transformer_impl != "local" and available


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def transformer_config(config: Config) -> TransformerConfig:
    """The TransformerConfig of a resolved configuration."""
    model, parallel = config.model, config.parallel
    dtype = torch.bfloat16 if model.bf16 else torch.float32
    pipelined = parallel.pipeline_model_parallel_size > 1
    interleaved = parallel.num_virtual_stages_per_pipeline_rank is not None
    options = dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        softmax_scale=model.softmax_scale,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        init_method_std=model.init_method_std,
        # Weights are set by name afterwards (weights.py), so the memory is only taken here.
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        bf16=model.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.num_virtual_stages_per_pipeline_rank,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size(parallel),
        sequence_parallel=parallel.sequence_parallel,
        # Chunks and branches have lengths of their own: shapes go ahead of the activations.
        variable_seq_lengths=pipelined,
        deallocate_pipeline_outputs=pipelined,
        # Batched p2p orders messages differently on the two sides under an interleaved schedule over gloo.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # Token weights are normalised globally before they reach the loss; this makes Megatron apply no factor
        # of its own (schedules.py:263-276) and sum gradients over dp-cp (distributed_data_parallel.py:258).
        calculate_per_token_loss=True,
        recompute_granularity=parallel.recompute_granularity,
        recompute_method=parallel.recompute_method,
        recompute_num_layers=parallel.recompute_num_layers,
        # Fusions that need apex or Transformer Engine kernels.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        # transformer_config.py:1827 rejects the default 'allgather' with variable lengths even without experts.
        moe_token_dispatcher_type=model.moe_token_dispatcher_type,
    )
    if model.num_experts:
        options.update(
            num_moe_experts=model.num_experts,
            moe_router_topk=model.moe_router_topk,
            moe_router_pre_softmax=model.moe_router_pre_softmax,
            moe_ffn_hidden_size=model.moe_ffn_hidden_size,
            moe_shared_expert_intermediate_size=model.moe_shared_expert_intermediate_size,
            # The auxiliary loss would be counted with weights of its own; refused by the config rules.
            moe_router_load_balancing_type="none",
            moe_grouped_gemm=False,
        )
    result = TransformerConfig(**options)
    if model.position_embedding_type == "yarn":
        # GPTModel reads these by getattr (gpt_model.py:172-190); TransformerConfig has no such fields.
        for name in _YARN_FIELDS:
            setattr(result, name, getattr(model, name))
        result.yarn_correction_range_round_to_int = True
        result.position_embedding_type = "yarn"
    return result


def layer_spec(config: Config) -> ModuleSpec:
    """One decoder layer of our own with our core attention (and, without Transformer Engine, our norm)."""
    model = config.model
    options = dict(num_experts=model.num_experts, moe_grouped_gemm=False, qk_layernorm=model.qk_layernorm)
    if uses_transformer_engine(model):
        spec = get_gpt_layer_with_transformer_engine_spec(**options)
    else:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", **options)
        spec.submodules.input_layernorm = TorchRMSNorm
        spec.submodules.pre_mlp_layernorm = TorchRMSNorm
        if model.qk_layernorm:
            attention = spec.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    spec.module, spec.params = BranchLayer, _mlp_blocks(config)
    spec.submodules.self_attention.submodules.core_attention = BranchCoreAttention
    return spec


def _mlp_blocks(config: Config) -> dict[str, int]:
    """What a layer is told about blocks of its MLP. Expert-parallel ranks meet in every block, so all run as many as
    their longest chunk has."""
    rows = config.prefix.prefix_mlp_block_tokens
    if rows is None:
        return {}
    meet = config.parallel.expert_model_parallel_size > 1
    most = -(-config.rows_of_rank(config.prefix.prefix_chunk_tokens) // rows)
    return {"mlp_block_rows": rows, "least_mlp_blocks": most if meet else 1}


def _block_spec(config: Config, megatron_config: TransformerConfig, vp_stage: int | None):
    spec = layer_spec(config)
    if uses_transformer_engine(config.model):
        return spec
    # The block's own final norm comes with the submodules, else the stock one is used (transformer_block.py:258).
    num_layers = get_num_layers_to_build(megatron_config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=TorchRMSNorm)


def build_model_chunks(config: Config) -> list[GPTModel]:
    """This rank's model chunks (one, or one per virtual pipeline stage), unwrapped, with Megatron's random weights."""
    megatron_config, stages = transformer_config(config), [None]
    if config.parallel.num_virtual_stages_per_pipeline_rank is not None:
        stages = list(range(config.parallel.num_virtual_stages_per_pipeline_rank))
    with cpu_runtime.tensor_scope():
        return [_build_chunk(config, megatron_config, stage) for stage in stages]


def _build_chunk(config: Config, megatron_config: TransformerConfig, vp_stage: int | None) -> GPTModel:
    model = config.model
    chunk = GPTModel(
        megatron_config,
        _block_spec(config, megatron_config, vp_stage),
        model.padded_vocab_size(config.parallel.tensor_model_parallel_size),
        model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        vp_stage=vp_stage,
    )
    if model.rotary_seq_len_interpolation_factor != 1.0:
        # As Hugging Face does it; Megatron would scale the positions, which rounds otherwise.
        chunk.rotary_pos_emb.inv_freq = chunk.rotary_pos_emb.inv_freq / model.rotary_seq_len_interpolation_factor
    if model.use_rope_scaling:
        chunk.rotary_pos_emb.inv_freq = llama3_inv_freq(chunk.rotary_pos_emb.inv_freq, model)
    chunk.rotary_pos_emb = OffsetRotary(chunk.rotary_pos_emb)
    return chunk
