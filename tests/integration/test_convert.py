"""Every family, both directions: transformers' logits, bit-equal exports, and the same tensors as mbridge."""
import filecmp
import json
from shutil import copytree

import numpy as np
import pytest
import torch

from megatron_longstraw.config import ConfigError
from megatron_longstraw.convert.errors import FolderError
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.calls import response_logits
from megatron_longstraw.mcore.hf_weights import save_hf
from megatron_longstraw.mcore.parameters import named_shards
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.types import Branch, PromptGroup
from tests.hf_models import CASES, ORIGINAL_TOKENS, adopt, edit_config, make_folder, transformers_logits

TOKENS = 5 * ORIGINAL_TOKENS
LARGEST_LOGIT_DIFF = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of a case, made once."""
    made = {}

    def get(case):
        if case not in made:
            made[case] = make_folder(case, tmp_path_factory.mktemp("hf") / "model")
        return made[case]

    return get


def policy_of(folder, **options):
    config, source = adopt(folder, **options)
    return Policy(config, parallel.initialize(config), source), source


def logits_of(policy, prompt_tokens=30):
    """Float32 logits after the prompt, and the ids they belong to."""
    ids = np.random.default_rng(3).integers(0, policy.config.model.vocab_size, TOKENS + 1)
    group = PromptGroup(ids[: prompt_tokens + 1], [Branch(ids[prompt_tokens + 1 :])])
    return torch.from_numpy(response_logits(policy, group)[0]), ids[:-1], prompt_tokens


def same_files(one, other):
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    return [name for name in names if not filecmp.cmp(one / name, other / name, shallow=False)] == []


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers_and_the_export_is_the_source(case, folders, tmp_path):
    """Head sizes, biases and norms of their own (G08, G09), positions far past the original context (H09), and files
    beside the weights that come back byte for byte (G15)."""
    folder = folders(case)
    policy, source = policy_of(folder, prefix_chunk_tokens=16)
    ours, ids, first = logits_of(policy)
    theirs = transformers_logits(folder, ids)[first:]
    assert theirs.abs().max() > 0.5
    assert (ours - theirs).abs().max() <= LARGEST_LOGIT_DIFF
    assert save_hf(policy.chunks, policy.config.model, source, tmp_path / "export") == []
    assert same_files(folder, tmp_path / "export")


@pytest.mark.parametrize("case", ["llama llama3", "llama linear", "llama yarn", "qwen2 yarn"])
def test_scaled_positions_matter_at_these_lengths(case, folders, tmp_path):
    """Without this the comparison above could pass with the wrong scaling."""
    folder = folders(case)
    policy, _ = policy_of(folder)
    scaled, ids, first = logits_of(policy)
    plain = copytree(folder, tmp_path / "plain")
    theta = json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_theta"]
    edit_config(plain, rope_parameters={"rope_type": "default", "rope_theta": theta})
    assert (scaled - transformers_logits(plain, ids)[first:]).abs().max() > 100 * LARGEST_LOGIT_DIFF


def test_both_layouts_of_config_json_give_one_model(folders, tmp_path):
    for case in ("llama llama3", "llama yarn", "llama linear", "qwen2 tied"):
        folder = folders(case)
        older = copytree(folder, tmp_path / case.replace(" ", "_"))
        rope = json.loads((older / "config.json").read_text())["rope_parameters"]
        scaling = {("type" if key == "rope_type" else key): value for key, value in rope.items() if key != "rope_theta"}
        edit_config(older, rope_parameters=None, rope_theta=rope["rope_theta"], rope_scaling=scaling)
        assert adopt(older)[0].model == adopt(folder)[0].model


def test_sharded_and_bfloat16_sources_come_back_bit_for_bit(tmp_path):
    folder = make_folder("qwen3", tmp_path / "source", torch.bfloat16, shard_bytes=100_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    for number, bf16 in enumerate([False, True]):
        policy, source = policy_of(folder, bf16=bf16)
        save_hf(policy.chunks, policy.config.model, source, tmp_path / f"export{number}")
        assert same_files(folder, tmp_path / f"export{number}")


# Tied ones last: mbridge remembers a tied head in a table that its families share.
@pytest.mark.parametrize("case", ["llama head_dim", "qwen3", "qwen3_moe", "llama tied", "qwen2 tied"])
def test_parameters_are_those_of_mbridge(case, folders):
    """Name by name, both directions."""
    from mbridge import AutoBridge
    from safetensors.torch import load_file

    folder = folders(case)
    policy, _ = policy_of(folder)
    bridge = AutoBridge.from_pretrained(str(folder), dtype=torch.float32)
    source = load_file(folder / "model.safetensors")
    compared = 0
    for shard, parameter in named_shards(policy.chunks, policy.config.model):
        name = shard.name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
        dense_norm = "mlp.linear_fc1.layer_norm_weight" if "moe" not in case else "pre_mlp_layernorm.weight"
        name = name.replace("pre_mlp_layernorm.weight", dense_norm)
        number = name.partition("local_experts.")[2].partition(".")[0]
        if number:  # mbridge knows grouped experts: one weight per number
            name = name.replace(f"local_experts.{number}.", "") + number
        names = bridge._weight_name_mapping_mcore_to_hf(name)
        tensors = [source[theirs] for theirs in names]
        padded = bridge._weight_to_mcore_format(name, tensors)
        assert torch.equal(parameter[: shard.num_unpadded_rows], padded[: shard.num_unpadded_rows]), shard.name
        compared += len(names)
    assert compared == len(source)


def test_prefixed_tied_embeddings(folders, tmp_path):
    """G06: tied is what config.json says, whatever the tensors are called."""
    from safetensors.torch import load_file, save_file

    folder = copytree(folders("llama tied"), tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file({f"language_model.{name}": value for name, value in tensors.items()}, folder / "model.safetensors")
    policy, source = policy_of(folder)
    save_hf(policy.chunks, policy.config.model, source, tmp_path / "export")
    assert same_files(folder, tmp_path / "export")


def test_a_second_copy_of_a_tied_embedding_is_written_too(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = copytree(folders("llama tied"), tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    policy, source = policy_of(folder)
    with torch.no_grad():
        policy.chunks[0].embedding.word_embeddings.weight.add_(1.0)
    save_hf(policy.chunks, policy.config.model, source, tmp_path / "export")
    trained = load_file(tmp_path / "export" / "model.safetensors")
    assert torch.equal(trained["lm_head.weight"], tensors["model.embed_tokens.weight"] + 1.0)
    assert torch.equal(trained["lm_head.weight"], trained["model.embed_tokens.weight"])
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(FolderError, match="lm_head.weight differs"):
        adopt(folder)


def test_tensors_without_a_place_are_an_error_or_copied(folders, tmp_path):
    """G14: never dropped silently."""
    from safetensors.torch import load_file, save_file

    folder = copytree(folders("qwen3"), tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"mtp.layers.0.weight": torch.ones(3, 2)}, folder / "model.safetensors")
    with pytest.raises(FolderError, match="mtp.layers.0.weight in model.safetensors.*--backfill"):
        adopt(folder)
    policy, source = policy_of(folder, backfill=True)
    notes = save_hf(policy.chunks, policy.config.model, source, tmp_path / "export")
    assert len(notes) == 1 and "mtp.layers.0.weight" in notes[0]
    assert same_files(folder, tmp_path / "export")


def test_rotary_settings_of_the_run_are_in_the_exported_config(folders, tmp_path):
    """A context lengthened for training must reach the engine that serves the model (H08)."""
    folder = folders("qwen2 tied")
    options = dict(position_embedding_type="yarn", yarn_rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=16)
    policy, source = policy_of(folder, max_position_embeddings=1024, **options)
    scaled, ids, first = logits_of(policy)
    plain, _, _ = logits_of(policy_of(folder)[0])
    assert (scaled - plain).abs().max() > 0.01
    policy, source = policy_of(folder, max_position_embeddings=1024, **options)
    (note,) = save_hf(policy.chunks, policy.config.model, source, tmp_path / "export")
    assert "yarn" in note
    assert (transformers_logits(tmp_path / "export", ids)[first:] - scaled).abs().max() <= LARGEST_LOGIT_DIFF
    assert adopt(tmp_path / "export")[0].model == policy.config.model


def test_settings_that_contradict_the_folder_are_named(folders):
    with pytest.raises(ConfigError) as error:
        adopt(folders("qwen3"), num_layers=2, kv_channels=16, rotary_base=5e5)
    assert "num_layers 2" in str(error.value) and "--kv-channels" in str(error.value)
    assert "rotary_base" not in str(error.value), "a longer context is the run's own business"
    with pytest.raises(ConfigError, match="parameters such as .*bias"):
        policy_of(folders("qwen3"), add_qkv_bias=True)


def test_dropout_of_the_model_is_zero_whatever_the_config_leaves_out(folders):
    """C08: two forwards in train mode agree to the last bit."""
    policy, _ = policy_of(folders("llama head_dim"))
    policy.chunks[0].train()
    assert policy.megatron_config.hidden_dropout == policy.megatron_config.attention_dropout == 0.0
    assert torch.equal(logits_of(policy)[0], logits_of(policy)[0])


def test_nothing_half_written_is_left(folders, tmp_path, monkeypatch):
    policy, source = policy_of(folders("qwen3"))
    target = tmp_path / "export"
    save_hf(policy.chunks, policy.config.model, source, target)
    before = (target / "model.safetensors").read_bytes()
    with pytest.raises(FolderError, match="exists already"):
        save_hf(policy.chunks, policy.config.model, source, target)
    assert (target / "model.safetensors").read_bytes() == before

    def no_space(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", no_space)
    with pytest.raises(OSError, match="No space left"):
        save_hf(policy.chunks, policy.config.model, source, tmp_path / "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export"]
