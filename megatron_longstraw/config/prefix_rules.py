"""What has to hold for the shared prompt: what is stored of it, what its chunks need, and FP8.

An option that would do nothing is a problem.
"""
from __future__ import annotations

from typing import Iterator

from megatron_longstraw.config.problems import divides, problem
from megatron_longstraw.config.schema import SETTINGS, Config, ModelConfig, ParallelConfig, PrefixConfig


def prefix_problems(config: Config) -> Iterator[str]:
    resolved = config.resolve()
    yield from _memory_problems(resolved)
    yield from _storage_problems(config.prefix)
    yield from _fp8_problems(resolved)


def _memory_problems(config: Config) -> Iterator[str]:
    """What saves memory or time of the prompt has to have something to save."""
    if config.prefix.prefix_graph_bytes:
        yield from _graph_problems(config)
    if config.prefix.prefix_activation_bytes is not None:
        yield from _budget_problems(config)
        return
    block_rows = config.prefix.prefix_mlp_block_tokens
    if block_rows is not None and config.prefix.schedule == "full":
        yield _without_chunks("prefix_mlp_block_tokens", block_rows)
    elif block_rows is not None:
        rows = config.rows_of_rank(config.prefix.prefix_chunk_tokens)
        if block_rows >= rows:
            yield problem(
                f"prefix_mlp_block_tokens {block_rows} for {rows} rows of a chunk on a rank",
                "fewer than the chunk has, or there is nothing to cut",
                "prefix_mlp_block_tokens",
                "prefix_chunk_tokens",
            )
        if config.prefix.fp8_prefix != "off" and config.prefix.fp8_backend != "emulated" and block_rows % 16:
            yield problem(
                f"prefix_mlp_block_tokens {block_rows} with fp8_prefix {config.prefix.fp8_prefix}",
                "a multiple of 16, or fp8_backend emulated: FP8 matrix products take no other number of rows",
                "prefix_mlp_block_tokens",
                "fp8_backend",
            )


def _graph_problems(config: Config) -> Iterator[str]:
    prefix, parallel = config.prefix, config.parallel
    graphs = f"prefix_graph_bytes {prefix.prefix_graph_bytes}"
    if prefix.schedule == "full":
        yield _without_chunks("prefix_graph_bytes", prefix.prefix_graph_bytes)
    if prefix.prefix_grad == "frozen":
        need = "a walk back to keep them for"
        yield problem(f"{graphs} with prefix_grad frozen", need, "prefix_graph_bytes", "prefix_grad")
    reasons = {
        "pipeline_model_parallel_size": "1: a stage's backward needs the input that its forward received, in one call",
        "expert_model_parallel_size": "1: ranks meet in each other's forwards and would miss one that has none",
    }
    for name, reason in reasons.items():
        if getattr(parallel, name) > 1:
            yield problem(f"{graphs} with {name} {getattr(parallel, name)}", reason, "prefix_graph_bytes", name)


def _budget_problems(config: Config) -> Iterator[str]:
    budget = f"prefix_activation_bytes {config.prefix.prefix_activation_bytes}"
    if config.prefix.schedule == "full":
        yield _without_chunks("prefix_activation_bytes", config.prefix.prefix_activation_bytes)
    if "prefix_chunk_tokens" in config.given:
        yield problem(
            f"{budget} beside prefix_chunk_tokens {config.prefix.prefix_chunk_tokens}",
            "one of them: the bytes choose the tokens",
            "prefix_activation_bytes",
            "prefix_chunk_tokens",
        )


def _without_chunks(name: str, value: object) -> str:
    need = "branch: whole sequences have no prompt chunks"
    return problem(f"{name} {value} with schedule full", need, "schedule", name)


def _storage_problems(prefix: PrefixConfig) -> Iterator[str]:
    """Options that would do nothing; of a prefix that is not resolved."""
    stored = ("prefix_kv_dtype", "prefix_grad_dtype", "prefix_kv_tier", "prefix_device_bytes")
    given = [name for name in stored if getattr(prefix, name) != SETTINGS[name].default]
    given += ["prefix_out_tier"] * (prefix.prefix_out_tier == "host")
    if prefix.schedule == "full":
        for name in given:
            yield problem(
                f"{name} {getattr(prefix, name)} with schedule full",
                "branch: whole sequences keep nothing of a prompt",
                name,
                "schedule",
            )
        return
    if prefix.prefix_grad == "frozen":
        for name in (name for name in given if name in ("prefix_grad_dtype", "prefix_out_tier")):
            yield problem(
                f"{name} {getattr(prefix, name)} with prefix_grad frozen",
                "exact or last:N: without a walk back there is nothing of it to keep",
                name,
                "prefix_grad",
            )
    if prefix.prefix_device_bytes is not None and prefix.prefix_kv_tier == "device":
        yield problem(
            f"prefix_device_bytes {prefix.prefix_device_bytes} with prefix_kv_tier device",
            "host, without which all stays on the device",
            "prefix_kv_tier",
            "prefix_device_bytes",
        )


def _fp8_problems(config: Config) -> Iterator[str]:
    """What the device can do is found out where there is one (mcore/fp8.py)."""
    model, parallel, prefix = config.model, config.parallel, config.prefix
    if prefix.fp8_prefix == "off":
        if prefix.fp8_backend != "auto":
            yield problem(
                f"fp8_backend {prefix.fp8_backend} with fp8_prefix off",
                "a recipe, without which nothing runs in FP8",
                "fp8_prefix",
                "fp8_backend",
            )
        return
    if prefix.schedule == "full":
        yield problem(
            f"fp8_prefix {prefix.fp8_prefix} with schedule full",
            "branch: whole sequences have no prompt pass of their own",
            "schedule",
            "fp8_prefix",
        )
    if prefix.fp8_prefix == "tensorwise" and parallel.expert_model_parallel_size > 1:
        yield problem(
            f"fp8_prefix tensorwise with expert_model_parallel_size {parallel.expert_model_parallel_size}",
            "blockwise: an expert's one scale would depend on other ranks' prompts, and differ when a prompt runs again",
            "fp8_prefix",
            "expert_model_parallel_size",
        )
    if prefix.fp8_backend != "emulated":
        yield from _fp8_width_problems(model, parallel)


def _fp8_width_problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """FP8 matrix products take widths in multiples of 16."""
    tp, heads, groups, channels = (
        parallel.tensor_model_parallel_size, model.num_attention_heads, model.num_query_groups, model.kv_channels
    )  # fmt: skip
    widths = [
        ("hidden_size", model.hidden_size, 1),
        ("num_attention_heads", heads * channels, tp),
        ("num_query_groups", (heads + 2 * groups) * channels, tp),
    ]
    if model.num_experts is None:
        widths.append(("ffn_hidden_size", model.ffn_hidden_size, tp))
    else:
        expert_tp = 1 if parallel.expert_model_parallel_size > 1 else tp
        widths.append(("moe_ffn_hidden_size", model.moe_ffn_hidden_size, expert_tp))
        widths.append(("moe_shared_expert_intermediate_size", model.moe_shared_expert_intermediate_size or 0, tp))
    for name, width, ranks in widths:
        if not divides(16 * ranks, width):
            yield problem(
                f"fp8_prefix with a linear layer of width {width} over {ranks} ranks ({name})",
                "a multiple of 16 on each, or fp8_backend emulated",
                name,
                "fp8_backend",
            )
