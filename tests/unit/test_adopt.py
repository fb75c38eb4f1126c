"""A run's configuration with the model of a folder in it."""
import json

import pytest

from megatron_longstraw.config import ConfigError, load_config
from megatron_longstraw.convert.adopt import check_window, open_folder
from tests.hf_models import adopt, edit_config, make_folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_folder("mistral", tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture
def folder(source, tmp_path):
    """A copy to change."""
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_explicit_head_size_and_groups(tmp_path):
    """G08"""
    model = adopt(make_folder("llama head_dim", tmp_path / "model"))[0].model
    assert (model.kv_channels, model.hidden_size, model.num_attention_heads, model.num_query_groups) == (32, 64, 4, 2)


def test_a_folder_without_theta_needs_the_flag(folder):
    edit_config(folder, rope_parameters={"rope_type": "default"})
    with pytest.raises(ConfigError, match="--rotary-base"):
        adopt(folder)
    assert adopt(folder, rotary_base=10000.0)[0].model.rotary_base == 10000.0


def test_prompts_beyond_an_attention_window_are_refused(folder):
    edit_config(folder, sliding_window=100)
    for options, words in (({}, "any length"), ({"max_prompt_length": 93}, "101 tokens")):
        config, source = adopt(folder, **options)
        with pytest.raises(ConfigError, match=words):
            check_window(config, source)
    check_window(*adopt(folder, max_prompt_length=92))


@pytest.mark.parametrize(
    "changes", [dict(use_sliding_window=False, sliding_window=64), dict(sliding_window=None, use_sliding_window=True)]
)
def test_a_window_that_is_off_is_no_window(changes, tmp_path):
    folder = make_folder("qwen3", tmp_path / "model")
    edit_config(folder, layer_types=None, **changes)
    check_window(*adopt(folder))


def test_stop_ids_come_from_the_generation_config(folder):
    """D03: all of them; what the run says wins."""
    edit_config(folder, eos_token_id=7)
    (folder / "generation_config.json").unlink()
    assert adopt(folder)[0].rollout.stop_token_ids == (7,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8, 9]}))
    assert adopt(folder)[0].rollout.stop_token_ids == (7, 8, 9)
    assert adopt(folder, stop_token_ids=[5])[0].rollout.stop_token_ids == (5,)
    assert adopt(folder, stop_token_ids=[])[0].rollout.stop_token_ids == ()


def test_the_written_configuration_adopts_the_same_folder_again(folder, tmp_path_factory):
    from megatron_longstraw.config import to_toml

    config, source = adopt(folder)
    path = tmp_path_factory.mktemp("run") / "config.toml"
    path.write_text(to_toml(config))
    again = load_config([path])
    from megatron_longstraw.convert.adopt import with_model_of

    assert with_model_of(again, open_folder(again)).resolve() == config


@pytest.mark.parametrize(
    ("vocab_size", "tp_size", "padded"),
    [(151936, 1, 151936), (151936, 2, 152064), (151936, 4, 152064), (151936, 8, 152576), (128256, 8, 129024)],
)
def test_padded_vocabulary(vocab_size, tp_size, padded):
    """G03"""
    model = load_config(overrides={"vocab_size": vocab_size}).model
    assert model.padded_vocab_size(tp_size) == padded
