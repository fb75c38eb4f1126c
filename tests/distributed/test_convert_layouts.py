"""Hugging Face folders and Megatron checkpoints under tensor, pipeline, virtual pipeline and expert parallelism."""
import filecmp
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_longstraw.convert.errors import FolderError
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.calls import response_logits
from megatron_longstraw.mcore.checkpoint import load_weights, require_newest, save_weights
from megatron_longstraw.mcore.hf_weights import load_hf, save_hf
from megatron_longstraw.mcore.model import build_model_chunks
from megatron_longstraw.mcore.parameters import named_shards
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.types import Branch, PromptGroup
from tests.distributed.launch import run_ranks
from tests.hf_models import adopt, make_folder, transformers_logits

LAYOUTS = {
    "tp2": ("qwen2 tied", 2, dict(tensor_model_parallel_size=2)),
    "tp2 untied": ("llama llama3", 2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "tp2 mistral": ("mistral", 2, dict(tensor_model_parallel_size=2)),
    "tp2 qwen3": ("qwen3", 2, dict(tensor_model_parallel_size=2)),
    "pp2": ("qwen3", 2, dict(pipeline_model_parallel_size=2)),
    "pp2 mistral": ("mistral", 2, dict(pipeline_model_parallel_size=2)),
    "pp2 qwen2": ("qwen2 yarn", 2, dict(pipeline_model_parallel_size=2)),
    "pp2 llama": ("llama llama3", 2, dict(pipeline_model_parallel_size=2)),
    "pp2 experts": ("qwen3_moe raw", 2, dict(pipeline_model_parallel_size=2)),
    "pp2 tied": ("qwen3 tied", 2, dict(pipeline_model_parallel_size=2)),
    "pp2 vpp2": ("llama tied", 2, dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)),
    "ep2": ("qwen3_moe", 2, dict(expert_model_parallel_size=2)),
    "cut experts": ("qwen3_moe", 2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "tp2 pp2": ("llama yarn", 4, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)),
}
IDS = np.random.default_rng(3).integers(0, 90, 65)


def export(rank, folder, target, options):
    """Logits through this layout, and an export by all ranks."""
    config, source = adopt(Path(folder), **options)
    policy = Policy(config, parallel.initialize(config), source)
    logits = response_logits(policy, PromptGroup(IDS[:30], [Branch(IDS[30:])]))[0]
    save_hf(policy.chunks, config.model, source, target)
    return logits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_reads_and_writes_the_same_model(layout, tmp_path):
    """Also with the embedding tied across pipeline stages (G07)."""
    case, world_size, options = LAYOUTS[layout]
    folder, target = make_folder(case, tmp_path / "source"), tmp_path / "export"
    results = run_ranks(export, world_size, str(folder), str(target), options)
    theirs = transformers_logits(folder, IDS[:-1])[29:]
    for logits in results:
        assert np.abs(logits - theirs.numpy()).max() <= 1e-4
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in target.iterdir())
    assert all(filecmp.cmp(folder / name, target / name, shallow=False) for name in names)


def refused(rank, folder, target):
    """What each rank is told when the target exists."""
    config, source = adopt(Path(folder), tensor_model_parallel_size=2)
    policy = Policy(config, parallel.initialize(config), source)
    with pytest.raises(FolderError) as error:
        save_hf(policy.chunks, config.model, source, target)
    return str(error.value)


def test_all_ranks_hear_why_an_export_is_refused(tmp_path):
    folder = make_folder("qwen2 tied", tmp_path / "source")
    messages = run_ranks(refused, 2, str(folder), str(folder))
    assert messages[0] == messages[1] and "exists already" in messages[0]


def to_checkpoint(rank, folder, checkpoint, options):
    config, source = adopt(Path(folder), **options)
    parallel.initialize(config)
    chunks = build_model_chunks(config)
    load_hf(chunks, config.model, source)
    save_weights(chunks, checkpoint, "")


def from_checkpoint(rank, folder, checkpoint, target, options):
    config, source = adopt(Path(folder), **options)
    parallel.initialize(config)
    chunks = build_model_chunks(config)
    for _, parameter in named_shards(chunks, config.model):
        torch.nn.init.constant_(parameter, float("nan"))
    load_weights(chunks, config.model, require_newest(checkpoint)[0].path)
    padded = [p[shard.num_unpadded_rows :] for shard, p in named_shards(chunks, config.model) if "word_emb" in shard.name]
    assert not any(rows.any() for rows in padded)
    save_hf(chunks, config.model, source, target)
    dist.barrier()
    return sum(rows.numel() for rows in padded)


PAIRS = {
    "tp2 to pp2": ("qwen2 tied", (2, dict(tensor_model_parallel_size=2)), (2, dict(pipeline_model_parallel_size=2))),
    "one to tp2": ("llama llama3", (1, {}), (2, dict(tensor_model_parallel_size=2))),
    "ep2 to one": ("qwen3_moe", (2, dict(expert_model_parallel_size=2)), (1, {})),
    "vpp to ep2": (
        "qwen3_moe",
        (2, dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)),
        (2, dict(expert_model_parallel_size=2)),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_checkpoints_cross_layouts(pair, tmp_path):
    """Padding of the vocabulary differs between them (90 rows padded to 128 or 256) and shows nowhere (G03)."""
    case, (saving, save_options), (loading, load_options) = PAIRS[pair]
    folder, checkpoint, target = make_folder(case, tmp_path / "source"), tmp_path / "megatron", tmp_path / "export"
    run_ranks(to_checkpoint, saving, str(folder), str(checkpoint), save_options)
    run_ranks(from_checkpoint, loading, str(folder), str(checkpoint), str(target), load_options)
    assert filecmp.cmp(folder / "model.safetensors", target / "model.safetensors", shallow=False)
