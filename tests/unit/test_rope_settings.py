"""config.json's rotary settings, in both layouts, and the frequencies that the model really has."""
import dataclasses

import numpy as np
import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_longstraw.config import ModelConfig, load_config, validate
from megatron_longstraw.context_parallel.layout import slice_sequence
from megatron_longstraw.convert.hf_config import HFConfig
from megatron_longstraw.convert.rope import read_rope, write_rope
from megatron_longstraw.mcore import cpu_runtime
from megatron_longstraw.mcore.model import build_model_chunks
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.packed import BranchParams
from megatron_longstraw.mcore.rotary import llama3_inv_freq
from megatron_longstraw.prefix.microbatch import MicroBatch

LLAMA3 = dict(
    rope_type="llama3", factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192
)


def rope_of(**values):
    hf = HFConfig({"max_position_embeddings": 4096} | values)
    settings = read_rope(hf)
    assert hf.problems == []
    return settings, hf


def last_frequency(**values):
    """The lowest frequency of a head of 128 channels under this config.json: its phase at position 1."""
    settings, _ = rope_of(**values)
    model = ModelConfig(hidden_size=128, num_attention_heads=1, num_layers=1, **settings).resolve()
    config = dataclasses.replace(load_config(), model=model).resolve()
    parallel.initialize(config)
    cpu_runtime.install()
    (chunk,) = build_model_chunks(config)
    phases = chunk.rotary_pos_emb.inner.get_emb(1, 1)  # YaRN's comes with the attention factor
    return float((phases[0] if isinstance(phases, tuple) else phases).flatten()[63])


def test_the_nested_layout_alone_gives_theta_and_scaling():
    """H01"""
    settings, _ = rope_of(rope_parameters=LLAMA3 | {"rope_theta": 500000})
    assert settings["rotary_base"] == 500000.0 and settings["use_rope_scaling"]
    assert last_frequency(rope_parameters=LLAMA3 | {"rope_theta": 500000}) == pytest.approx(3.0689e-7, rel=1e-4)


def test_theta_beside_the_nested_table_counts():
    """H02"""
    assert rope_of(rope_parameters={"rope_type": "default"}, rope_theta=1e6)[0]["rotary_base"] == 1e6


def test_no_theta_anywhere_is_not_ten_thousand():
    """H02: the run has to say it (see test_adopt)."""
    assert "rotary_base" not in rope_of(rope_parameters={"rope_type": "default"})[0]


def test_nested_theta_wins_with_a_warning_and_is_exported_in_both_places():
    """H03"""
    values = dict(rope_parameters={"rope_type": "default", "rope_theta": 500000}, rope_theta=10000)
    settings, hf = rope_of(**values)
    assert settings["rotary_base"] == 500000.0
    assert "rope_theta is 500000" in hf.warnings[0]
    written = write_rope(values, ModelConfig(**settings).resolve())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 500000.0


@pytest.mark.parametrize(("factor", "frequency"), [(8, 3.0689e-7), (32, 7.6723e-8)])
def test_the_factor_of_llama3_scaling_is_used(factor, frequency):
    """H04"""
    rope = LLAMA3 | {"factor": factor}
    assert last_frequency(rope_theta=500000.0, rope_scaling=rope) == pytest.approx(frequency, rel=1e-4)


def test_asking_for_yarn_changes_the_frequencies():
    """H08"""
    plain = last_frequency(rope_theta=10000.0)
    yarn = last_frequency(rope_theta=10000.0, rope_scaling={"type": "yarn", "factor": 4.0})
    assert yarn == pytest.approx(plain / 4, rel=1e-6)


def test_yarn_defaults_and_attention_factor():
    settings, _ = rope_of(rope_theta=1e4, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert settings["yarn_original_max_position_embeddings"] == 4096
    assert settings["max_position_embeddings"] == 16384, "the context that the scaling was made for"
    assert (settings["yarn_mscale"], settings["yarn_mscale_all_dim"]) == (1.0, 0.0)
    settings, _ = rope_of(rope_theta=1e4, rope_scaling={"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25})
    assert 0.1 * settings["yarn_mscale"] * np.log(4.0) + 1.0 == pytest.approx(1.25)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        LLAMA3 | {"rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16.0},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.3},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ],
)
def test_written_settings_read_back_as_they_were(rope):
    settings, _ = rope_of(rope_parameters=rope)
    again, _ = rope_of(**write_rope({"rope_scaling": None, "rope_theta": 0}, ModelConfig(**settings).resolve()))
    assert again == pytest.approx(settings)


def test_two_scalings_at_once_are_refused():
    problems = validate(load_config(overrides=dict(rotary_seq_len_interpolation_factor=2.0, use_rope_scaling=True)))
    assert any("--rotary-seq-len-interpolation-factor" in problem for problem in problems)


def test_positions_are_exact_where_bfloat16_would_collide():
    """H11: phases of neighbouring positions differ, and the cosine of position 15962 is the true one."""
    cpu_runtime.install()
    rotary = RotaryEmbedding(kv_channels=128, rotary_percent=1.0, rotary_base=10000, use_cpu_initialization=True)
    for position in (256, 15962, 1048576):
        here, after = rotary.get_emb(2, position)[:, 0, 0, 0].tolist()
        assert (here, after) == (position, position + 1)
    assert float(torch.cos(rotary.get_emb(1, 15962)[0, 0, 0, 0])) == pytest.approx(-0.9080, abs=1e-4)


SCALINGS = {
    "plain": dict(rope_type="default"),
    "llama3": LLAMA3 | dict(factor=32.0),
    "yarn": dict(rope_type="yarn", factor=64.0, original_max_position_embeddings=32768),
    "linear": dict(rope_type="linear", factor=64.0),
}


def frequencies(kind):
    """Of a head of 128 channels, in float64, by the published rules (float32 frequencies would hide their own error)."""
    channel = torch.arange(0, 128, 2, dtype=torch.float64)
    plain = 1e6 ** -(channel / 128)
    if kind == "linear":
        return plain / 64
    if kind == "llama3":
        smooth = ((8192 * plain / (2 * np.pi) - 1) / (4 - 1)).clamp(0, 1)
        return (1 - smooth) * plain / 32 + smooth * plain
    if kind == "yarn":
        low, high = (128 * np.log(32768 / (beta * 2 * np.pi)) / (2 * np.log(1e6)) for beta in (32, 1))
        ramp = ((channel / 2 - np.floor(low)) / (np.ceil(high) - np.floor(low))).clamp(0, 1)
        return plain / 64 * ramp + plain * (1 - ramp)
    return plain


def phases_at(kind, position):
    """[2, 64] phases of two neighbouring tokens, as the model's attention gets them."""
    settings, _ = rope_of(rope_parameters={"rope_theta": 1e6} | SCALINGS[kind])
    shape = dict(hidden_size=128, num_attention_heads=1, num_layers=1)
    config = dataclasses.replace(load_config(), model=ModelConfig(**shape | settings)).resolve()
    parallel.initialize(config)
    cpu_runtime.install()
    (chunk,) = build_model_chunks(config)
    micro_batch = MicroBatch(slice_sequence(position, 2, cp_rank=0, cp_size=1))
    params = BranchParams(micro_batch=micro_batch, rotary_offset=position, rotary_rows=2)
    num_rows = chunk.rotary_pos_emb.get_rotary_seq_len(None, None, None, None, packed_seq_params=params)
    phases = chunk.rotary_pos_emb(num_rows)
    return (phases[0] if isinstance(phases, tuple) else phases)[:, 0, 0, :64]


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize(
    ("position", "error_rad"), [(1048575, 0.07), (2097151, 0.13), (4194303, 0.21), (8388606, 0.45)]
)
def test_phases_at_millions_of_positions_are_off_by_what_is_documented(kind, position, error_rad):
    """H13: float32 products of exact positions, as in Megatron and Hugging Face."""
    phases = phases_at(kind, position)
    true = torch.outer(torch.tensor([position, position + 1], dtype=torch.float64), frequencies(kind))
    assert phases.dtype == torch.float32
    assert float((phases.double() - true).abs().max()) <= error_rad
    if kind != "linear":
        assert phases[:, 0].tolist() == [position, position + 1], "the fastest channel turns by one radian per token"


def test_llama3_needs_all_four_parameters():
    inv_freq = torch.tensor([1e-3])
    model = ModelConfig(use_rope_scaling=True, rope_scaling_original_max_position_embeddings=8192)
    other = ModelConfig(use_rope_scaling=True, rope_scaling_original_max_position_embeddings=64)
    assert llama3_inv_freq(inv_freq, model) != llama3_inv_freq(inv_freq, other)
