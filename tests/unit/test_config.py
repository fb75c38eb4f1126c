"""Flags, TOML files and the rules between fields."""
from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys

import pytest

from megatron_longstraw.config import (
    SECTIONS,
    SETTINGS,
    AlgorithmConfig,
    Config,
    ConfigError,
    ModelConfig,
    ParallelConfig,
    PrefixConfig,
    RolloutConfig,
    add_config_flags,
    check,
    config_from_args,
    load_config,
    parse_args,
    parse_bytes,
    to_toml,
    validate,
)


@pytest.fixture
def toml(tmp_path):
    """Writes TOML texts to files and returns their paths."""

    def write(*texts: str):
        paths = [tmp_path / f"{number}.toml" for number in range(len(texts))]
        for path, text in zip(paths, texts):
            path.write_text(text, encoding="utf-8")
        return paths

    return write


def problems_of(call, *args, **kwargs) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    return caught.value.problems


def only_problem_of(call, *args, **kwargs) -> str:
    (problem,) = problems_of(call, *args, **kwargs)
    return problem


# The schema


def test_import_needs_neither_torch_nor_megatron():
    code = "import megatron_longstraw.config, sys; assert not {'torch', 'megatron', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_field_names_and_flags_are_unique_over_sections():
    assert len(SETTINGS) == sum(len(dataclasses.fields(section)) for section in SECTIONS.values())
    flags = [flag for setting in SETTINGS.values() for flag in setting.flags]
    assert len(flags) == len(set(flags))


def test_every_default_is_accepted_and_every_field_has_help():
    for setting in SETTINGS.values():
        assert setting.problem(setting.default) is None
        assert len(setting.option.help) > 5


def test_sections_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().rollout.group_size = 2
    with pytest.raises(TypeError):
        RolloutConfig(2)


# Flags


def test_no_flags_give_the_defaults():
    assert parse_args([]) == Config() == load_config()


def test_flags_set_fields_of_all_kinds():
    config = parse_args(
        "--context-parallel-size 2 --lr 3e-6 --prefix-grad last:3 --sequence-parallel "
        "--no-norm-adv-by-std-in-grpo --stop-token-ids 7 9 --top-p=0.9".split()
    )
    assert config.parallel.context_parallel_size == 2
    assert config.optimizer.lr == 3e-6
    assert config.prefix.prefix_grad == "last:3"
    assert config.parallel.sequence_parallel is True
    assert config.algorithm.norm_adv_by_std_in_grpo is False
    assert config.rollout.stop_token_ids == (7, 9)
    assert config.rollout.top_p == 0.9


@pytest.mark.parametrize(
    "flag, section, name, value",
    [
        ("--n", "rollout", "group_size", 4),
        ("--n-samples-per-prompt", "rollout", "group_size", 4),
        ("--rollout-temperature", "rollout", "temperature", 0.5),
        ("--rollout-max-response-len", "rollout", "max_response_length", 12),
        ("--rollout-batch-size", "algorithm", "train_batch_size", 6),
    ],
)
def test_aliases(flag, section, name, value):
    config = parse_args([flag, str(value)])
    assert getattr(getattr(config, section), name) == value


@pytest.mark.parametrize(
    "text, number",
    [("0", 0), ("4096", 4096), ("2K", 2048), ("3M", 3 << 20), ("1.5G", 3 << 29), ("16GiB", 16 << 30), ("1 kib", 1024)],
)
def test_prefix_state_budget_takes_suffixes(text, number, toml):
    assert parse_bytes(text) == number
    assert parse_args(["--prefix-state-budget", text]).prefix.prefix_state_budget == number
    (path,) = toml(f'[prefix]\nprefix_state_budget = "{text}"')
    assert load_config([path]).prefix.prefix_state_budget == number


@pytest.mark.parametrize("text", ["lots", "3X", "-1", "", "G"])
def test_prefix_state_budget_refuses_other_texts(text):
    with pytest.raises(ValueError, match="number of bytes"):
        parse_bytes(text)
    problem = only_problem_of(parse_args, [f"--prefix-state-budget={text}"])
    assert "--prefix-state-budget" in problem and repr(text) in problem and "GiB" in problem


@pytest.mark.parametrize(
    "flag, suggestion",
    [
        ("--context-paralel-size", "--context-parallel-size"),
        ("--context-parallel", "--context-parallel-size"),
        ("--context_parallel_size", "--context-parallel-size"),
        ("--no-sequence-paralel", "--no-sequence-parallel"),
        ("--conifg", "--config"),
    ],
)
def test_unknown_flag_names_the_closest(flag, suggestion):
    problem = only_problem_of(parse_args, [flag, "2"])
    assert problem == f"unknown flag {flag}; did you mean {suggestion}?"


def test_flag_like_no_other_is_still_an_error():
    assert only_problem_of(parse_args, ["--zzzzzz=1"]) == "unknown flag --zzzzzz"


def test_value_without_a_flag_is_an_error():
    assert "'stray'" in only_problem_of(parse_args, ["stray"])


def test_all_problems_of_a_command_line_are_reported_together():
    problems = problems_of(parse_args, "--swiglu --lr fast --group-size 0".split())
    assert len(problems) == 3
    assert "--swiglu" in problems[0]
    assert any("group of size 0" in problem for problem in problems)
    assert any("'fast'" in problem and "--lr" in problem for problem in problems)


def test_help_shows_flags_and_defaults(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--prefix-chunk-tokens N prompt tokens per capture" in shown
    assert "(default: 2048)" in shown


def test_tool_with_flags_of_its_own():
    tool = argparse.ArgumentParser()
    tool.add_argument("--output", default="plan.txt")
    config, namespace = parse_args(["--num-layers", "8", "--output", "x.txt"], extra=tool)
    assert (config.model.num_layers, namespace.output) == (8, "x.txt")


def test_tool_that_parses_by_itself():
    tool = argparse.ArgumentParser()
    tool.add_argument("lr")  # its own argument, by chance named as a field
    add_config_flags(tool)
    namespace = tool.parse_args(["low", "--num-layers", "8"])
    config = config_from_args(namespace)
    assert namespace.lr == "low"
    assert config == load_config(overrides={"num_layers": 8})
    with pytest.raises(SystemExit):
        tool.parse_args(["low", "--num-lay", "8"])


# TOML


def test_precedence_is_defaults_files_left_to_right_flags(toml):
    first, second = toml(
        "[rollout]\ngroup_size = 2\ntemperature = 0.5\ntop_p = 0.5\n",
        "[rollout]\ntemperature = 0.6\ntop_p = 0.6\n",
    )
    config = parse_args(["--top-p", "0.7", "--config", str(first), "--config", str(second)])
    assert config.rollout == RolloutConfig(group_size=2, temperature=0.6, top_p=0.7)
    assert parse_args(["--config", str(second), "--config", str(first)]).rollout.temperature == 0.5
    assert load_config([first, second], {"top_p": 0.7}) == config


def test_toml_values_of_all_kinds(toml):
    (path,) = toml(
        '[model]\nbf16 = true\nrotary_base = 1000000\n[rollout]\nstop_token_ids = [1, 2]\n[run]\nrun_dir = "a b"\n'
    )
    config = load_config([path])
    assert config.model.bf16 is True
    assert type(config.model.rotary_base) is float and config.model.rotary_base == 1e6
    assert config.rollout.stop_token_ids == (1, 2)
    assert config.run.run_dir == "a b"


def test_none_undoes_what_a_file_set(toml):
    first, second = toml('[parallel]\nrecompute_granularity = "full"', '[parallel]\nrecompute_granularity = "none"')
    assert load_config([first]).parallel.recompute_granularity == "full"
    assert load_config([first, second]).parallel.recompute_granularity is None
    flags = ["--config", str(first), "--recompute-granularity", "none"]
    assert parse_args(flags).parallel.recompute_granularity is None
    # Here none is a value: nothing is kept.
    assert parse_args(["--prefix-out-tier", "none"]).prefix.prefix_out_tier == "none"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("[prefix]\nprefix_chunk_token = 1", ["prefix_chunk_token in [prefix]", "did you mean prefix_chunk_tokens"]),
        ("[prefix]\ncontext_parallel_size = 2", ["context_parallel_size in [prefix]", "belongs in [parallel]"]),
        ("[prefix]\ncontext_paralel_size = 2", ["did you mean context_parallel_size in [parallel]"]),
        ("[rollout]\nn-samples-per-prompt = 2", ["did you mean group_size in [rollout]"]),
        ("[paralel]\nx = 2", ["unknown section [paralel]", "did you mean parallel"]),
        ("lr = 1.0", ["unknown key lr outside any section", "lr in [optimizer]"]),
        ("parallel = 3", ["parallel = 3", "a table [parallel]"]),
        ("[model", ["is not TOML"]),
    ],
)
def test_unusable_toml_names_the_file_and_the_way_out(text, expected, toml):
    (path,) = toml(text)
    problem = only_problem_of(load_config, [path])
    for part in (str(path), *expected):
        assert part in problem


@pytest.mark.parametrize(
    "section, name, value",
    [
        ("parallel", "context_parallel_size", '"2"'),
        ("parallel", "context_parallel_size", "true"),
        ("parallel", "context_parallel_size", "2.0"),
        ("parallel", "context_parallel_size", "0"),
        ("parallel", "sequence_parallel", "1"),
        ("parallel", "recompute_granularity", '"some"'),
        ("model", "position_embedding_type", '"learned"'),
        ("model", "rotary_percent", "1.5"),
        ("model", "rotary_percent", "0.0"),
        ("model", "norm_epsilon", "inf"),
        ("prefix", "prefix_grad", '"last:0"'),
        ("prefix", "prefix_state_budget", '"many"'),
        ("prefix", "prefix_state_budget", "-1"),
        ("rollout", "temperature", "0"),
        ("rollout", "top_p", "0.0"),
        ("rollout", "stop_token_ids", "[1, -1]"),
        ("rollout", "stop_token_ids", '["eos"]'),
        ("rollout", "stop_token_ids", "7"),
        ("reward", "reward_function", '"not_a_reference"'),
        ("run", "run_dir", '""'),
    ],
)
def test_refused_toml_value_names_key_value_and_flag(section, name, value, toml):
    (path,) = toml(f"[{section}]\n{name} = {value}")
    problem = only_problem_of(load_config, [path])
    assert problem.startswith(f"{path}: {section}.{name}: got ")
    assert ", need " in problem
    assert problem.endswith("change --" + name.replace("_", "-"))


@pytest.mark.parametrize(
    "flag, needs",
    [
        ("--position-embedding-type", "need rope or yarn;"),
        ("--recompute-method", "need uniform or block or none;"),
        ("--num-layers", "need a whole number >= 1;"),
        ("--rotary-percent", "need a finite number <= 1.0 and above 0.0;"),
        ("--stop-token-ids", "need a list of whole numbers >= 0;"),
        ("--reward-function", "need module:function;"),
    ],
)
def test_refusal_says_what_is_needed(flag, needs):
    assert needs in only_problem_of(parse_args, [flag, "x"])


def test_missing_file_is_named(tmp_path):
    assert str(tmp_path / "no.toml") in only_problem_of(load_config, [tmp_path / "no.toml"])


def test_problems_of_all_files_and_overrides_are_reported_together(toml):
    paths = toml("[model]\nnum_layers = 0\nlayers = 3", "[run]\nseed = -1")
    assert len(problems_of(load_config, paths, {"lr": -1.0, "learning_rate": 1.0})) == 5


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_experts": 4, "recompute_granularity": "full", "stop_token_ids": (3, 5), "lr": 2.5e-7},
        {"prefix_state_budget": 10**13, "softmax_scale": 0.1, "prompt_function": "my.data:prompts"},
        {"run_dir": 'C:\\runs\t"quoted" \x7f \u00e9\U0001f600', "prefix_out_tier": "none", "bf16": True},
    ],
)
def test_written_toml_loads_to_an_equal_config(overrides, toml):
    config = load_config(overrides=overrides)
    for written in (config, config.resolve()):
        (path,) = toml(to_toml(written))
        assert load_config([path]) == written


# Derived values


def test_resolve_fills_what_follows_from_other_fields():
    config = load_config(
        overrides={
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_experts": 2,
            "recompute_granularity": "full",
            "clip_ratio": 0.3,
            "clip_ratio_high": 0.4,
            "train_batch_size": 5,
        }
    ).resolve()
    model, parallel, algorithm = config.model, config.parallel, config.algorithm
    assert (model.ffn_hidden_size, model.moe_ffn_hidden_size) == (384, 384)
    assert (model.num_query_groups, model.kv_channels) == (6, 16)
    assert (parallel.recompute_method, parallel.recompute_num_layers) == ("uniform", 1)
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high) == (0.3, 0.4)
    assert algorithm.ppo_mini_batch_size == 5
    assert config.resolve() == config


def test_resolve_leaves_alone_what_is_given_or_has_no_meaning():
    config = load_config(overrides={"kv_channels": 32, "ffn_hidden_size": 100}).resolve()
    assert (config.model.kv_channels, config.model.ffn_hidden_size) == (32, 100)
    assert config.model.moe_ffn_hidden_size is None
    assert config.parallel.recompute_method is None


@pytest.mark.parametrize(
    "grad, given, tier",
    [
        ("exact", None, "device"),
        ("last:2", None, "device"),
        ("frozen", None, "none"),
        ("exact", "none", "none"),
        ("exact", "host", "host"),
    ],
)
def test_resolved_out_tier(grad, given, tier):
    assert PrefixConfig(prefix_grad=grad, prefix_out_tier=given).resolve().prefix_out_tier == tier


@pytest.mark.parametrize(
    "options, limit",
    [
        ({}, None),
        ({"prefix_kv_tier": "host"}, 0),
        ({"prefix_kv_tier": "host", "prefix_device_bytes": "2K"}, 2048),
    ],
)
def test_resolved_device_bytes(options, limit):
    config = load_config(overrides=options)
    assert validate(config) == validate(config.resolve()) == []
    assert config.resolve().prefix.prefix_device_bytes == limit


@pytest.mark.parametrize("grad, chunks", [("exact", 5), ("frozen", 0), ("last:1", 1), ("last:5", 5), ("last:12", 5)])
def test_num_chunks_walked_back(grad, chunks):
    prefix = PrefixConfig(prefix_grad=grad)
    assert prefix.num_chunks_walked_back(5) == chunks
    assert prefix.num_chunks_walked_back(0) == 0


# Rules


@pytest.mark.parametrize(
    "overrides, world_size",
    [
        ({}, None),
        ({}, 1),
        ({}, 3),
        ({"train_batch_size": 3}, 2),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}, 8),
        ({"num_layers": 8, "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}, 4),
        ({"num_experts": 4, "expert_model_parallel_size": 4, "context_parallel_size": 2}, 4),
        ({"num_experts": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True}, 2),
        ({"num_experts": 4, "moe_token_dispatcher_type": "allgather"}, 2),
        ({"num_attention_heads": 3, "kv_channels": 16}, 1),
        ({"position_embedding_type": "yarn"}, 1),
        ({"use_rope_scaling": True}, 1),
        ({"train_batch_size": 6, "ppo_mini_batch_size": 3}, 1),
        ({"lr_warmup_iters": 3, "train_iters": 4}, 1),
        ({"schedule": "full"}, 1),
        ({"prefix_activation_bytes": 1}, 1),
        ({"prefix_graph_bytes": 1, "context_parallel_size": 2, "num_experts": 2}, 2),
        ({"prefix_mlp_block_tokens": 63, "prefix_chunk_tokens": 128, "context_parallel_size": 2}, 2),
        ({"fp8_prefix": "tensorwise"}, 1),
        ({"fp8_prefix": "blockwise", "num_experts": 4, "expert_model_parallel_size": 2}, 2),
        ({"fp8_prefix": "blockwise", "fp8_backend": "emulated", "ffn_hidden_size": 50}, 1),
    ],
)
def test_accepted(overrides, world_size):
    config = load_config(overrides=overrides)
    assert validate(config, world_size) == []
    assert validate(config.resolve(), world_size) == []
    check(config, world_size)


RULES = {
    "world is no multiple": (
        {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
        6,
        ["tensor 2 * pipeline 1 * context 2 = 4", "6 ranks", "--context-parallel-size"],
    ),
    "world is too small": ({"context_parallel_size": 4}, 2, ["= 4 for a world of 2 ranks"]),
    "ep does not divide the stage": (
        {"num_experts": 6, "expert_model_parallel_size": 3, "pipeline_model_parallel_size": 2},
        8,
        ["expert_model_parallel_size 3", "4 ranks of a pipeline stage", "--expert-model-parallel-size"],
    ),
    "experts over ep": ({"num_experts": 3, "expert_model_parallel_size": 2}, 2, ["num_experts 3"]),
    "ep without experts": ({"expert_model_parallel_size": 2}, 2, ["without num_experts", "--num-experts"]),
    "expert width without experts": ({"moe_ffn_hidden_size": 64}, None, ["--moe-ffn-hidden-size"]),
    "shared experts without experts": (
        {"moe_shared_expert_intermediate_size": 64},
        None,
        ["--moe-shared-expert-intermediate-size"],
    ),
    "topk above experts": ({"num_experts": 2, "moe_router_topk": 3}, None, ["--moe-router-topk"]),
    "experts with tp need sp": (
        {"num_experts": 2, "tensor_model_parallel_size": 2},
        None,
        ["no sequence_parallel", "--sequence-parallel"],
    ),
    "allgather with ep": (
        {"num_experts": 2, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"},
        None,
        ["allgather", "alltoall", "--moe-token-dispatcher-type"],
    ),
    "heads over tp": (
        {"num_attention_heads": 6, "num_query_groups": 4, "kv_channels": 16, "tensor_model_parallel_size": 4},
        None,
        ["num_attention_heads 6", "num_query_groups 4 for"],
    ),
    "query groups over tp": (
        {"num_query_groups": 2, "tensor_model_parallel_size": 4},
        None,
        ["num_query_groups 2 over tensor_model_parallel_size 4"],
    ),
    "query groups over heads": ({"num_query_groups": 3}, None, ["num_query_groups 3 for num_attention_heads 4"]),
    "heads over hidden": (
        {"num_attention_heads": 5},
        None,
        ["hidden_size 64 for num_attention_heads 5", "--kv-channels"],
    ),
    "odd kv_channels": ({"kv_channels": 15}, None, ["even", "--kv-channels"]),
    "odd derived kv_channels": ({"hidden_size": 60}, None, ["kv_channels 15"]),
    "ffn over tp": ({"ffn_hidden_size": 99, "tensor_model_parallel_size": 2}, None, ["ffn_hidden_size 99"]),
    "expert ffn over tp": (
        {
            "num_experts": 2,
            "moe_ffn_hidden_size": 99,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
        },
        None,
        ["moe_ffn_hidden_size 99"],
    ),
    "shared expert ffn over tp": (
        {
            "num_experts": 2,
            "moe_shared_expert_intermediate_size": 99,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
        },
        None,
        ["moe_shared_expert_intermediate_size 99"],
    ),
    "layers over pp": (
        {"num_layers": 3, "pipeline_model_parallel_size": 2},
        None,
        ["num_layers 3 over pipeline_model_parallel_size 2", "--num-layers"],
    ),
    "layers over vpp": (
        {"num_layers": 2, "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
        None,
        ["num_virtual_stages_per_pipeline_rank 2", "a multiple of 4"],
    ),
    "vpp without pp": (
        {"num_virtual_stages_per_pipeline_rank": 2},
        None,
        ["--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-size"],
    ),
    "sp without tp": ({"sequence_parallel": True}, None, ["--sequence-parallel"]),
    "recompute method alone": ({"recompute_method": "block"}, None, ["--recompute-granularity"]),
    "recompute layers alone": ({"recompute_num_layers": 2}, None, ["--recompute-granularity"]),
    "hidden dropout": ({"hidden_dropout": 0.1}, None, ["--hidden-dropout"]),
    "attention dropout": ({"attention_dropout": 0.1}, None, ["--attention-dropout"]),
    "router jitter": ({"moe_input_jitter_eps": 0.01}, None, ["--moe-input-jitter-eps"]),
    "expert capacity": ({"moe_expert_capacity_factor": 1.0}, None, ["chunks", "--moe-expert-capacity-factor"]),
    "auxiliary loss": ({"moe_aux_loss_coeff": 0.01}, None, ["divided by response tokens", "--moe-aux-loss-coeff"]),
    "fp16": ({"fp16": True}, None, ["loss scale", "--bf16"]),
    "llama scaling of yarn": (
        {"use_rope_scaling": True, "position_embedding_type": "yarn"},
        None,
        ["--use-rope-scaling"],
    ),
    "llama scaling factors": (
        {"use_rope_scaling": True, "rope_scaling_low_freq_factor": 4.0},
        None,
        ["--rope-scaling-low-freq-factor"],
    ),
    "too long": (
        {"max_prompt_length": 100, "max_response_length": 50, "max_position_embeddings": 149},
        None,
        ["150 tokens", "--max-position-embeddings"],
    ),
    "stop id outside the vocabulary": ({"stop_token_ids": (5, 256)}, None, ["[256]", "--stop-token-ids"]),
    "full schedule without the prompt's gradient": (
        {"schedule": "full", "prefix_grad": "frozen"},
        None,
        ["--schedule", "--prefix-grad"],
    ),
    "MLP blocks without chunks": (
        {"schedule": "full", "prefix_mlp_block_tokens": 64},
        None,
        ["schedule full", "--prefix-mlp-block-tokens"],
    ),
    "MLP blocks as long as the chunk": (
        {
            "prefix_mlp_block_tokens": 64,
            "prefix_chunk_tokens": 256,
            "context_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
        },
        None,
        ["prefix_mlp_block_tokens 64 for 64 rows", "--prefix-chunk-tokens"],
    ),
    "bytes to choose a chunk by without chunks": (
        {"schedule": "full", "prefix_activation_bytes": 2**30},
        None,
        ["schedule full", "--prefix-activation-bytes"],
    ),
    "a chunk beside bytes to choose it by": (
        {"prefix_chunk_tokens": 2048, "prefix_activation_bytes": 2**30},
        None,
        ["1073741824 beside prefix_chunk_tokens 2048", "--prefix-chunk-tokens"],
    ),
    "graphs without chunks": ({"schedule": "full", "prefix_graph_bytes": 1}, None, ["schedule full", "--prefix-graph-bytes"]),
    "graphs nobody walks": ({"prefix_grad": "frozen", "prefix_graph_bytes": 1}, None, ["--prefix-grad", "walk back"]),
    "graphs over a pipeline": (
        {"pipeline_model_parallel_size": 2, "prefix_graph_bytes": 1},
        None,
        ["prefix_graph_bytes 1 with pipeline_model_parallel_size 2"],
    ),
    "graphs under expert parallelism": (
        {"num_experts": 2, "expert_model_parallel_size": 2, "prefix_graph_bytes": 1},
        None,
        ["prefix_graph_bytes 1 with expert_model_parallel_size 2"],
    ),
    "storage of a prefix under the full schedule": (
        {"schedule": "full", "prefix_kv_dtype": "fp8", "prefix_grad_dtype": "bf16", "prefix_out_tier": "host"},
        None,
        ["prefix_kv_dtype fp8 with schedule full", "prefix_grad_dtype bf16 with", "prefix_out_tier host with"],
    ),
    "tier of a prefix under the full schedule": (
        {"schedule": "full", "prefix_kv_tier": "host", "prefix_device_bytes": "1G"},
        None,
        ["prefix_kv_tier host with schedule full", "prefix_device_bytes 1073741824 with schedule full"],
    ),
    "device bytes on the device": (
        {"prefix_device_bytes": 0},
        None,
        ["prefix_device_bytes 0 with prefix_kv_tier device", "change --prefix-kv-tier or --prefix-device-bytes"],
    ),
    "nothing to keep under frozen": (
        {"prefix_grad": "frozen", "prefix_grad_dtype": "bf16", "prefix_out_tier": "host"},
        None,
        ["prefix_grad_dtype bf16 with prefix_grad frozen", "prefix_out_tier host with prefix_grad frozen"],
    ),
    "fp8 of MLP blocks": (
        {"fp8_prefix": "blockwise", "prefix_mlp_block_tokens": 24},
        None,
        ["prefix_mlp_block_tokens 24 with fp8_prefix blockwise", "multiple of 16"],
    ),
    "fp8 without a prompt pass": (
        {"fp8_prefix": "blockwise", "schedule": "full"},
        None,
        ["fp8_prefix blockwise with schedule full", "--schedule"],
    ),
    "fp8 backend without fp8": ({"fp8_backend": "emulated"}, None, ["fp8_backend emulated with fp8_prefix off", "--fp8-prefix"]),
    "fp8 scale over other ranks' prompts": (
        {"fp8_prefix": "tensorwise", "num_experts": 4, "expert_model_parallel_size": 2},
        2,
        ["fp8_prefix tensorwise with expert_model_parallel_size 2", "need blockwise"],
    ),
    "fp8 width": (
        {"fp8_prefix": "tensorwise", "ffn_hidden_size": 48, "tensor_model_parallel_size": 2},
        2,
        ["width 48 over 2 ranks (ffn_hidden_size)", "multiple of 16 on each", "--ffn-hidden-size or --fp8-backend"],
    ),
    "fp8 expert width": (
        {"fp8_prefix": "blockwise", "num_experts": 2, "moe_ffn_hidden_size": 40},
        None,
        ["width 40 over 1 ranks (moe_ffn_hidden_size)"],
    ),
    "fp8 heads": (
        {"fp8_prefix": "blockwise", "hidden_size": 48, "num_attention_heads": 3, "kv_channels": 8},
        None,
        ["width 24 over 1 ranks (num_attention_heads)"],
    ),
    "mini-batch over batch": (
        {"train_batch_size": 6, "ppo_mini_batch_size": 4},
        None,
        ["ppo_mini_batch_size 4", "train_batch_size 6"],
    ),
    "warmup past the decay": (
        {"lr_warmup_iters": 10, "lr_decay_iters": 10, "train_iters": 50},
        None,
        ["lr_warmup_iters 10 for lr_decay_iters 10"],
    ),
    "warmup past the run": (
        {"lr_warmup_iters": 10, "train_iters": 5},
        None,
        ["lr_warmup_iters 10 for train_iters 5", "--lr-warmup-iters"],
    ),
    "min_lr above lr": ({"min_lr": 1e-3}, None, ["--min-lr"]),
}


@pytest.mark.parametrize("overrides, world_size, expected", RULES.values(), ids=RULES.keys())
def test_rule(overrides, world_size, expected):
    config = load_config(overrides=overrides)
    problems = validate(config, world_size)
    assert problems
    for problem in problems:
        assert problem.startswith("got ") and ", need " in problem and "; change --" in problem
    for part in expected:
        assert any(part in problem for problem in problems)
    assert problems_of(check, config, world_size) == problems


@pytest.mark.parametrize(
    "config, expected",
    [
        (Config(rollout=RolloutConfig(group_size=0)), "group of size 0"),
        (Config(parallel=ParallelConfig(recompute_granularity="selective")), "attention twice on one input"),
        (Config(algorithm=AlgorithmConfig(clip_ratio_high=1.28)), "offset"),
        (Config(algorithm=AlgorithmConfig(clip_ratio=0.0)), "--clip-ratio"),
        (Config(prefix=PrefixConfig(prefix_grad="last:0")), "last:N with N >= 1"),
        (Config(rollout=RolloutConfig(top_p=1.5)), "--top-p"),
        (Config(model=ModelConfig(rotary_percent=0.0)), "--rotary-percent"),
        (Config(model=ModelConfig(num_attention_heads=0)), "--num-attention-heads"),
        (Config(model=ModelConfig(num_query_groups=0)), "--num-query-groups"),
        (Config(parallel=ParallelConfig(pipeline_model_parallel_size=0)), "--pipeline-model-parallel-size"),
        (Config(model=ModelConfig(hidden_size="64")), "--hidden-size"),
        (Config(model=ModelConfig(num_layers=None)), "--num-layers"),
    ],
)
def test_values_of_a_config_built_in_python_are_judged_too(config, expected):
    assert any(expected in problem for problem in validate(config, 1))


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--recompute-granularity", "selective"], "attention twice on one input"),
        (["--clip-ratio-high", "1.28"], "an offset from a ratio of 1, not a bound"),
        (["--group-size", "0"], "group of size 0"),
    ],
)
def test_refused_flag_says_why(flags, expected):
    assert expected in only_problem_of(parse_args, flags)


def test_all_rules_report_at_once():
    config = load_config(
        overrides={"sequence_parallel": True, "hidden_dropout": 0.5, "num_query_groups": 3, "context_parallel_size": 3}
    )
    config = dataclasses.replace(config, rollout=RolloutConfig(group_size=0))
    problems = validate(config, 4)
    assert len(problems) == 5
    message = str(pytest.raises(ConfigError, check, config, 4).value)
    assert "5 problems" in message
    assert all(problem in message for problem in problems)


@pytest.mark.parametrize(("vocab_size", "rows"), [(151936, 14134), (248320, 8648)])
def test_a_tensor_of_logits_stays_below_two_to_the_31(vocab_size, rows):
    """H14"""
    options = {"vocab_size": vocab_size, "make_vocab_size_divisible_by": 1}
    assert validate(load_config(overrides=options | {"log_probs_chunk_size": rows})) == []
    (problem,) = validate(load_config(overrides=options | {"log_probs_chunk_size": rows + 1}))
    assert f"at most {rows} rows" in problem and "--log-probs-chunk-size" in problem


def test_defaults_of_a_tool_lose_to_files_and_flags(tmp_path):
    (tmp_path / "run.toml").write_text("[optimizer]\nlr = 0.25\n")
    defaults = {"lr": 0.5, "seed": 7, "group_size": 3}
    parser = argparse.ArgumentParser()
    argv = ["--config", str(tmp_path / "run.toml"), "--seed", "9"]
    config, namespace = parse_args(argv, extra=parser, defaults=defaults)
    assert (config.optimizer.lr, config.run.seed, config.rollout.group_size) == (0.25, 9, 3)
    assert config_from_args(namespace, defaults, {"seed": 1}).run.seed == 1
