"""launch/models and launch/runs: they say what the models are, and claim what the planner finds."""
import re
from pathlib import Path

import pytest

from megatron_longstraw.config import SETTINGS, load_config, validate
from megatron_longstraw.convert.families import FAMILIES
from megatron_longstraw.convert.hf_config import HFConfig
from megatron_longstraw.launch import start
from megatron_longstraw.planner.bytes import GIB, bytes_of_rank, total_parameters

LAUNCH = Path(__file__).parents[2] / "launch"
MODELS = sorted(LAUNCH.glob("models/*.toml"))
RUNS = sorted(LAUNCH.glob("runs/*.toml"))
USABLE_GIB = {"96": 95.6, "141": 140.4}
"""Of H20 by its nominal size: 97,871 and 143,771 MiB as nvidia-smi shows them."""
LENGTHS = {"128k": 2**17, "1m": 2**20, "2.1m": 2**21}

_LLAMA = dict(model_type="llama", hidden_act="silu", attention_bias=False, mlp_bias=False, rms_norm_eps=1e-5)
_QWEN = dict(hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1e6, sliding_window=None, tie_word_embeddings=False)
_QWEN3 = dict(**_QWEN, head_dim=128, attention_bias=False, vocab_size=151936, max_position_embeddings=40960)
PUBLISHED = {
    "smollm2-135m": (
        134_515_008,
        dict(**_LLAMA, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9)
        | dict(num_key_value_heads=3, vocab_size=49152, max_position_embeddings=8192, rope_theta=100000)
        | dict(tie_word_embeddings=True, initializer_range=0.041666666666666664),
    ),
    "llama-3.1-8b": (
        8_030_261_248,
        dict(**_LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
        | dict(num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0)
        | dict(tie_word_embeddings=False)
        | dict(
            rope_scaling=dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            )
        ),
    ),
    "qwen2.5-7b": (
        7_615_616_512,
        dict(**_QWEN, model_type="qwen2", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28)
        | dict(num_attention_heads=28, num_key_value_heads=4, vocab_size=152064, max_position_embeddings=32768),
    ),
    "qwen3-8b": (
        8_190_735_360,
        dict(**_QWEN3, model_type="qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36)
        | dict(num_attention_heads=32, num_key_value_heads=8),
    ),
    "qwen3-30b-a3b": (
        30_532_122_624,
        dict(**_QWEN3, model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, num_hidden_layers=48)
        | dict(num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8)
        | dict(moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
    ),
}
"""Number of parameters and the relevant part of config.json, as published with the weights."""


def model_of(run: Path) -> Path:
    return LAUNCH / "models" / f"{run.name.split('_')[1]}.toml"


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_models_are_those_published(path):
    num_parameters, values = PUBLISHED[path.stem]
    config = load_config([path])
    assert validate(config) == [] and config.model.bf16
    assert {SETTINGS[name].section for name in config.given} == {"model"}
    assert total_parameters(config.model) == num_parameters
    hf = HFConfig(values)
    settings = FAMILIES[values["model_type"]].settings(hf)
    assert hf.problems == []
    assert {name: getattr(config.model, name) for name in settings} == settings


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_models_dry_run(path):
    text = start("megatron_longstraw.train", ["--config", str(path), "--dry-run", "--world-size", "8"], {})
    assert text.startswith("layout     cp8 on 8 ranks\n")
    assert "for each prompt token" in text, "no longest prompt is set"


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_runs_fit_the_part_that_they_name(path):
    part, length = re.fullmatch(r"8xh20-(\d+)gb_.*_(128k|1m|2\.1m)(?:_frozen)?\.toml", path.name).groups()
    config = load_config([model_of(path), path])
    assert validate(config, world_size=8) == []
    rollout, model = config.rollout, config.model
    assert rollout.max_prompt_length + rollout.max_response_length == LENGTHS[length] == model.max_position_embeddings
    assert model.yarn_rotary_scaling_factor * model.yarn_original_max_position_embeddings == LENGTHS[length]
    assert (config.prefix.prefix_grad == "frozen") == path.stem.endswith("_frozen")
    assert rollout.max_prompt_length >= 15 * config.prefix.prefix_chunk_tokens, "contiguous slices need many chunks"
    # Room for the CUDA context, communication buffers, and what the estimate of activations misses.
    planned = bytes_of_rank(config, 8)
    assert planned.total / GIB <= 0.9 * USABLE_GIB[part]
    comment = path.read_text().split("\n[")[0]
    assert f"{planned.total / GIB:.1f} GiB of each GPU's {USABLE_GIB[part]}" in comment
    assert f"on 8 H20 of {part} GB" in comment and "not run on such a machine" in comment
    for name in re.findall(r"launch/\S+", comment):
        assert (LAUNCH.parent / name).exists(), name


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_runs_dry_run(path):
    flags = ["--config", str(model_of(path)), "--config", str(path), "--dry-run", "--world-size", "8"]
    text = start("megatron_longstraw.train", flags, {})
    layout = "tp4 x cp2 + sp" if "qwen2.5" in path.name else "tp8 + sp"
    assert text.startswith(f"layout     {layout} on 8 ranks\n") and "most at once" in text


def test_every_length_has_a_run_of_both_models():
    names = {path.stem.partition("_")[2].removesuffix("_frozen") for path in RUNS}
    assert names == {f"{model}_{length}" for model in ("qwen2.5-7b", "qwen3-8b") for length in LENGTHS}
    assert {path.stem for path in MODELS} == set(PUBLISHED)


def test_the_readme_names_the_planned_bytes():
    table = [line.split("|")[-2].strip() for line in (LAUNCH.parent / "README.md").read_text().splitlines() if " GB | " in line]
    planned = [bytes_of_rank(load_config([model_of(path), path]), 8).total / GIB for path in RUNS]
    assert sorted(map(float, table)) == sorted(round(size, 1) for size in planned)
