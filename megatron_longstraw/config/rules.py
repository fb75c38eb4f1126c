"""What has to hold between the fields of a configuration, and between it and the number of ranks.

Every message says what it got, what it needs, and which flag to change; all of them are reported together.
"""
from __future__ import annotations

from typing import Iterator

from megatron_longstraw.config.prefix_rules import prefix_problems
from megatron_longstraw.config.problems import divides, problem
from megatron_longstraw.config.schema import SETTINGS, Config, ModelConfig, ParallelConfig
from megatron_longstraw.config.settings import ConfigError


def check(config: Config, world_size: int | None = None) -> None:
    """Raises ConfigError with all problems of `validate`, if there are any."""
    problems = validate(config, world_size)
    if problems:
        raise ConfigError(problems)


def validate(config: Config, world_size: int | None = None) -> list[str]:
    """All problems of a configuration, for a world of `world_size` ranks if that is known; empty if none."""
    problems = list(_field_problems(config))
    if not _types_hold(config):
        return problems  # sums over texts would fail, or mean nothing
    resolved = config.resolve()
    model, parallel = resolved.model, resolved.parallel
    problems += _head_problems(config.model, model)
    problems += _position_problems(resolved)
    problems += _determinism_problems(model)
    problems += _moe_problems(model, parallel)
    problems += _sharding_problems(model, parallel)
    problems += _schedule_problems(resolved)
    problems += prefix_problems(config)
    problems += _size_problems(resolved)
    problems += _optimizer_problems(resolved)
    problems += _checkpoint_problems(resolved)
    problems += _logging_problems(resolved)
    if world_size is not None:
        problems += _world_problems(parallel, world_size)
    return problems


def _field_problems(config: Config) -> Iterator[str]:
    for setting in SETTINGS.values():
        found = setting.problem(getattr(getattr(config, setting.section), setting.name))
        if found is not None:
            yield found


def _types_hold(config: Config) -> bool:
    return all(
        setting.has_type(getattr(getattr(config, setting.section), setting.name)) for setting in SETTINGS.values()
    )


def _head_problems(given: ModelConfig, model: ModelConfig) -> Iterator[str]:
    heads, groups = model.num_attention_heads, model.num_query_groups
    if not divides(groups, heads):
        yield problem(
            f"num_query_groups {groups} for num_attention_heads {heads}",
            "query groups that divide the heads",
            "num_query_groups",
        )
    if given.kv_channels is None and not divides(heads, model.hidden_size):
        yield problem(
            f"hidden_size {model.hidden_size} for num_attention_heads {heads}",
            "heads that divide the hidden size, or kv_channels",
            "num_attention_heads",
            "kv_channels",
        )
    elif not divides(2, model.kv_channels):
        yield problem(
            f"kv_channels {model.kv_channels}", "an even size, because channels rotate in pairs", "kv_channels"
        )


def _position_problems(config: Config) -> Iterator[str]:
    model, rollout = config.model, config.rollout
    if model.use_rope_scaling and model.position_embedding_type != "rope":
        yield problem(
            f"use_rope_scaling with position_embedding_type {model.position_embedding_type}",
            "rope: the Llama 3 scaling has no effect on another embedding",
            "use_rope_scaling",
            "position_embedding_type",
        )
    if model.rotary_seq_len_interpolation_factor != 1.0 and (model.use_rope_scaling or model.position_embedding_type != "rope"):
        yield problem(
            f"rotary_seq_len_interpolation_factor {model.rotary_seq_len_interpolation_factor} beside another scaling",
            "one way of scaling positions",
            "rotary_seq_len_interpolation_factor",
            "use_rope_scaling",
            "position_embedding_type",
        )
    if model.use_rope_scaling and model.rope_scaling_low_freq_factor >= model.rope_scaling_high_freq_factor:
        yield problem(
            f"rope_scaling_low_freq_factor {model.rope_scaling_low_freq_factor} and "
            f"rope_scaling_high_freq_factor {model.rope_scaling_high_freq_factor}",
            "a low factor below the high one",
            "rope_scaling_low_freq_factor",
        )
    longest = (rollout.max_prompt_length or 1) + rollout.max_response_length
    if longest > model.max_position_embeddings:
        yield problem(
            f"a longest prompt plus response of {longest} tokens",
            f"at most max_position_embeddings {model.max_position_embeddings}",
            "max_position_embeddings",
            "max_response_length",
        )
    foreign = [token for token in rollout.stop_token_ids if token >= model.vocab_size]
    if foreign:
        yield problem(
            f"stop_token_ids {foreign}", f"ids below vocab_size {model.vocab_size}", "stop_token_ids", "vocab_size"
        )


def _determinism_problems(model: ModelConfig) -> Iterator[str]:
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(model, name) != 0.0:
            yield problem(
                f"{name} {getattr(model, name)}",
                "0: the prompt runs again for its gradient and must give the same numbers as at capture",
                name,
            )
    if model.fp16:
        yield problem(
            "fp16",
            "bf16 or float32: float16 needs a loss scale, which the gradients kept with the prefix do not carry",
            "fp16",
            "bf16",
        )


def _moe_problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    if model.moe_input_jitter_eps not in (None, 0.0):
        yield problem(
            f"moe_input_jitter_eps {model.moe_input_jitter_eps}",
            "none: with noise the prompt's second run would route tokens to other experts than its capture",
            "moe_input_jitter_eps",
        )
    if model.moe_expert_capacity_factor is not None:
        yield problem(
            f"moe_expert_capacity_factor {model.moe_expert_capacity_factor}",
            "none: which tokens are dropped would depend on how the prompt is cut into chunks",
            "moe_expert_capacity_factor",
        )
    if model.moe_aux_loss_coeff != 0.0:
        yield problem(
            f"moe_aux_loss_coeff {model.moe_aux_loss_coeff}",
            "0: it would count every prompt token but be divided by response tokens, far too strong",
            "moe_aux_loss_coeff",
        )
    if model.num_experts is None:
        yield from _dense_problems(model, parallel)
        return
    if model.moe_router_topk == 1 and not model.moe_router_pre_softmax:
        yield problem(
            "moe_router_pre_softmax off with moe_router_topk 1",
            "on: the softmax over one expert is constant, so the router would not learn",
            "moe_router_pre_softmax",
            "moe_router_topk",
        )
    if model.moe_router_topk > model.num_experts:
        yield problem(
            f"moe_router_topk {model.moe_router_topk} of num_experts {model.num_experts}",
            "at most all experts",
            "moe_router_topk",
        )
    if not divides(parallel.expert_model_parallel_size, model.num_experts):
        yield problem(
            f"num_experts {model.num_experts} over expert_model_parallel_size {parallel.expert_model_parallel_size}",
            "experts that divide evenly",
            "expert_model_parallel_size",
        )
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield problem(
            f"num_experts with tensor_model_parallel_size {parallel.tensor_model_parallel_size} "
            "and no sequence_parallel",
            "sequence_parallel, without which Megatron's expert layer refuses to train",
            "sequence_parallel",
        )
    if model.moe_token_dispatcher_type == "allgather" and parallel.expert_model_parallel_size > 1:
        yield problem(
            "moe_token_dispatcher_type allgather with expert_model_parallel_size "
            f"{parallel.expert_model_parallel_size}",
            "alltoall: allgather assumes equal lengths on all ranks, and prompts differ",
            "moe_token_dispatcher_type",
        )


def _dense_problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    if parallel.expert_model_parallel_size > 1:
        yield problem(
            f"expert_model_parallel_size {parallel.expert_model_parallel_size} without num_experts",
            "a model with experts",
            "expert_model_parallel_size",
            "num_experts",
        )
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_router_pre_softmax"):
        if getattr(model, name) is not None:
            yield problem(f"{name} {getattr(model, name)} without num_experts", "num_experts", name, "num_experts")


def _sharding_problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    vpp = parallel.num_virtual_stages_per_pipeline_rank
    widths = ["num_attention_heads", "num_query_groups", "moe_shared_expert_intermediate_size"]
    if model.num_experts is None:
        widths.append("ffn_hidden_size")
    elif parallel.expert_model_parallel_size == 1:  # under expert parallelism routed experts are not cut over tp
        widths.append("moe_ffn_hidden_size")
    for name in widths:
        value = getattr(model, name)
        if value is not None and not divides(tp, value):
            yield problem(
                f"{name} {value} over tensor_model_parallel_size {tp}",
                f"a multiple of {tp}",
                "tensor_model_parallel_size",
                name,
            )
    if parallel.sequence_parallel and tp == 1:
        yield problem(
            "sequence_parallel with tensor_model_parallel_size 1",
            "tensor parallel ranks to split over",
            "sequence_parallel",
            "tensor_model_parallel_size",
        )
    if vpp is not None and pp == 1:
        yield problem(
            f"num_virtual_stages_per_pipeline_rank {vpp} with pipeline_model_parallel_size 1",
            "a pipeline to interleave",
            "num_virtual_stages_per_pipeline_rank",
            "pipeline_model_parallel_size",
        )
    if not divides(pp * (vpp or 1), model.num_layers):
        stages = f"pipeline_model_parallel_size {pp}"
        if vpp is not None:
            stages += f" * num_virtual_stages_per_pipeline_rank {vpp}"
        yield problem(
            f"num_layers {model.num_layers} over {stages}",
            f"a multiple of {pp * (vpp or 1)}",
            "num_layers",
            "pipeline_model_parallel_size",
        )
    for name in ("recompute_method", "recompute_num_layers"):
        if getattr(parallel, name) is not None and parallel.recompute_granularity is None:
            yield problem(
                f"{name} {getattr(parallel, name)} without recompute_granularity",
                "full, without which nothing is recomputed",
                "recompute_granularity",
                name,
            )


def _schedule_problems(config: Config) -> Iterator[str]:
    prefix, algorithm = config.prefix, config.algorithm
    if prefix.schedule == "full" and prefix.prefix_grad != "exact":
        yield problem(
            f"schedule full with prefix_grad {prefix.prefix_grad}",
            "exact: whole sequences always carry the prompt's gradient",
            "schedule",
            "prefix_grad",
        )
    if not divides(algorithm.ppo_mini_batch_size, algorithm.train_batch_size):
        yield problem(
            f"ppo_mini_batch_size {algorithm.ppo_mini_batch_size} "
            f"for train_batch_size {algorithm.train_batch_size} prompts",
            "mini-batches that divide the batch",
            "ppo_mini_batch_size",
            "train_batch_size",
        )


def _size_problems(config: Config) -> Iterator[str]:
    """Kernels that count elements of a tensor in 32 bits wrap around, some of them to a result that looks right."""
    tp = config.parallel.tensor_model_parallel_size
    rows, width = config.prefix.log_probs_chunk_size, config.model.padded_vocab_size(tp) // tp
    if rows * width >= 2**31:
        yield problem(
            f"log_probs_chunk_size {rows} for {width} vocabulary entries on a rank, a tensor of {rows * width} elements",
            f"fewer than 2^31, so at most {(2**31 - 1) // width} rows",
            "log_probs_chunk_size",
        )


def _optimizer_problems(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    decay_name, decay_iters = "lr_decay_iters", optimizer.lr_decay_iters
    if decay_iters is None:
        decay_name, decay_iters = "train_iters", config.run.train_iters * config.algorithm.updates_per_step
    # Megatron's scheduler asserts a strict inequality, with every decay style.
    if optimizer.lr_warmup_iters and optimizer.lr_warmup_iters >= decay_iters:
        yield problem(
            f"lr_warmup_iters {optimizer.lr_warmup_iters} for {decay_name} {decay_iters}",
            "a warmup that ends before the decay does",
            "lr_warmup_iters",
            "lr_decay_iters",
        )
    if optimizer.min_lr > optimizer.lr:
        yield problem(f"min_lr {optimizer.min_lr} above lr {optimizer.lr}", "at most lr", "min_lr", "lr")
    if optimizer.optimizer_cpu_offload and not (config.model.bf16 and config.parallel.use_distributed_optimizer):
        # Megatron's HybridDeviceOptimizer does not follow the master weights that its other optimizers make
        # (optimizer.py:640-700), and looks for one of every float32 weight (hybrid_optimizer.py:384).
        yield problem(
            f"optimizer_cpu_offload with bf16 {config.model.bf16}, "
            f"use_distributed_optimizer {config.parallel.use_distributed_optimizer}",
            "both",
            "optimizer_cpu_offload",
            "bf16",
            "use_distributed_optimizer",
        )


def _checkpoint_problems(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    for name in ("save_hf", "backfill"):
        if getattr(checkpoint, name) and checkpoint.hf_checkpoint is None:
            yield problem(
                f"{name} {getattr(checkpoint, name)} without hf_checkpoint",
                "the Hugging Face folder that the model comes from and whose other files go with it",
                "hf_checkpoint",
                name,
            )
    for name in ("save_interval", "async_save", "max_ckpt_to_keep", "save_retain_interval"):
        if getattr(checkpoint, name) and checkpoint.save is None:
            yield problem(f"{name} {getattr(checkpoint, name)} without save", "a folder for checkpoints", "save", name)
    if checkpoint.save_retain_interval and checkpoint.max_ckpt_to_keep is None:
        yield problem(
            f"save_retain_interval {checkpoint.save_retain_interval} without max_ckpt_to_keep",
            "a number of checkpoints to keep, without which all are kept",
            "max_ckpt_to_keep",
            "save_retain_interval",
        )
    if (checkpoint.resume_mode == "resume_path" or checkpoint.finetune) and checkpoint.load is None:
        name = "finetune" if checkpoint.finetune else "resume_mode"
        yield problem(f"{name} {getattr(checkpoint, name)} without load", "a checkpoint folder", "load", name)
    if checkpoint.resume_mode == "resume_path" and checkpoint.finetune:
        yield problem("finetune with resume_mode resume_path", "one of them", "finetune", "resume_mode")


def _logging_problems(config: Config) -> Iterator[str]:
    for name in ("wandb_exp_name", "wandb_save_dir"):
        value = getattr(config.logging, name)
        if value is not None and config.logging.wandb_project is None:
            yield problem(f"{name} {value} without wandb_project", "the project it belongs to", "wandb_project", name)


def _world_problems(parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    tp, pp, cp = (getattr(parallel, axis) for axis in axes)
    if world_size < 1 or not divides(tp * pp * cp, world_size):
        yield problem(
            f"tensor {tp} * pipeline {pp} * context {cp} = {tp * pp * cp} for a world of {world_size} ranks",
            "a product that divides the world size (the quotient is the data parallel size)",
            *axes,
        )
    elif not divides(parallel.expert_model_parallel_size, world_size // max(1, pp)):
        # Whole experts are spread over all ranks of a pipeline stage, whatever those do in attention.
        yield problem(
            f"expert_model_parallel_size {parallel.expert_model_parallel_size} for the "
            f"{world_size // pp} ranks of a pipeline stage",
            "a size that divides them",
            "expert_model_parallel_size",
        )
