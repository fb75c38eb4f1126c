"""Megatron checkpoints (dist_checkpointing, format torch_dist): readable under any other layout.

A run's own checkpoints are trusted input: torch's distributed format unpickles its metadata.
"""
from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt import GPTModel

from megatron_longstraw.config import ConfigError, ModelConfig
from megatron_longstraw.mcore import cpu_runtime
from megatron_longstraw.mcore.parameters import named_shards

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Megatron's name of a checkpoint that was converted, not trained."""


def save_weights(chunks: list[GPTModel], folder: str | Path) -> Path:
    """Write the weights as the checkpoint `release` of a folder; a call of all ranks.

    The tracker file moves last, so a reader never sees half a checkpoint.

    Returns: the checkpoint's own folder.

    Raises:
        ConfigError: the folder holds a checkpoint already.
    """
    folder = Path(folder)
    partial, final = folder / f".{RELEASE}.partial", folder / RELEASE
    if (folder / TRACKER).exists() or final.exists():
        raise ConfigError([f"{folder} holds a checkpoint already, and nothing is overwritten: change --save"])
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    with cpu_runtime.tensor_scope():
        dist_checkpointing.save({"checkpoint_version": 3.0, "iteration": 0, **_state(chunks)}, str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        partial.rename(final)
        tracker = folder / f".{TRACKER}.partial"
        tracker.write_text(RELEASE)
        tracker.rename(folder / TRACKER)
    dist.barrier()
    return final


@torch.no_grad()
def load_weights(chunks: list[GPTModel], model: ModelConfig, folder: str | Path, missing_ok: bool = False) -> list[str]:
    """Set every local parameter from a folder's latest checkpoint, saved under any layout.

    Args:
        missing_ok: parameters that the checkpoint lacks stay as they are.

    Returns: names of parameters that the checkpoint lacks.

    Raises:
        ConfigError: there is no checkpoint, or it is of another model.
    """
    path = latest(folder)
    saved = dist_checkpointing.load_tensors_metadata(str(path))
    problems, missing = [], []
    for key, tensor in _tensors(_state(chunks)):
        if key not in saved:
            missing.append(key)
        elif tuple(saved[key].global_shape) != tuple(tensor.global_shape) and not tensor.allow_shape_mismatch:
            problems.append(
                f"{path}: {key} has shape {list(saved[key].global_shape)}, need {list(tensor.global_shape)}; "
                f"change --load or the model's shape"
            )
    if missing and not missing_ok:
        problems += [f"{path}: has no {key}; change --load or the model's shape" for key in sorted(set(missing))[:10]]
    if problems:
        raise ConfigError(problems)
    with cpu_runtime.tensor_scope():
        loaded = dist_checkpointing.load(_state(chunks), str(path))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[_key(number)], strict=not missing)
    for shard, parameter in named_shards(chunks, model):
        # Vocabulary padding differs between layouts: rows the checkpoint had no numbers for are undefined.
        parameter[shard.num_unpadded_rows :].zero_()
    return sorted(set(missing))


def latest(folder: str | Path) -> Path:
    """The checkpoint that the tracker file names.

    Raises:
        ConfigError: there is none.
    """
    tracker = Path(folder) / TRACKER
    try:
        name = tracker.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{tracker} cannot be read ({error}), so there is no checkpoint; change --load"]) from None
    path = tracker.parent / (name if name == RELEASE else f"iter_{int(name):07d}" if name.isdigit() else "?")
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise ConfigError([f"{tracker} names {name!r}, and there is no such checkpoint beside it; change --load"])
    return path


def _state(chunks: list[GPTModel]) -> dict:
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {_key(number): chunk.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(chunks)}


def _key(number: int) -> str:
    return f"model{number}"


def _tensors(state: dict):
    """(key, ShardedTensor) of everything that is saved as a tensor."""
    apply_factories(state)
    return [(item.key, item) for item in nested_values(state) if isinstance(item, ShardedTensor)]
