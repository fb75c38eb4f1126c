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
from megatron.core.dist_checkpointing.strategies import torch as _torch_dist  # noqa: F401, else imported too late
from megatron.core.models.gpt import GPTModel

from megatron_longstraw.config import ConfigError, ModelConfig
from megatron_longstraw.mcore import cpu_runtime
from megatron_longstraw.mcore.parameters import named_shards

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Megatron's name of a checkpoint that was converted, not trained."""


def save_weights(chunks: list[GPTModel], folder: str | Path, model_toml: str) -> Path:
    """Write the weights as the checkpoint `release` of a folder; a call of all ranks.

    The tracker file moves last, so a reader never sees half a checkpoint.

    The parameters are given up (left empty): Megatron saves gate and up projections as two tensors, and copies of
    all of them at once would need half as much memory again.

    Args:
        model_toml: the [model] section they belong to, kept beside them as model.toml.

    Returns: the checkpoint's own folder.

    Raises:
        ConfigError: the folder holds a checkpoint already.
    """
    folder = Path(folder)
    partial, final = folder / f".{RELEASE}.partial", folder / RELEASE
    check_no_checkpoint(folder)
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _state(chunks)
    _split_storages(state, chunks)
    with cpu_runtime.tensor_scope():
        dist_checkpointing.save({"checkpoint_version": 3.0, "iteration": 0, **state}, str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        partial.rename(final)
        (folder / "model.toml").write_text(model_toml, encoding="utf-8")
        tracker = folder / f".{TRACKER}.partial"
        tracker.write_text(RELEASE)
        tracker.rename(folder / TRACKER)
    dist.barrier()
    return final


def check_no_checkpoint(folder: Path) -> None:
    """Raises:
    ConfigError: the folder holds a checkpoint already; nothing is overwritten.
    """
    if (folder / TRACKER).exists() or (folder / RELEASE).exists():
        raise ConfigError([f"{folder} holds a checkpoint already, and nothing is overwritten: change --save"])


def saved_dtypes(folder: str | Path) -> set[torch.dtype]:
    """Of the tensors of a folder's latest checkpoint."""
    return {tensor.dtype for tensor in dist_checkpointing.load_tensors_metadata(str(latest(folder))).values()}


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
    state = _state(chunks)
    for tensor in _tensors(state):
        key = tensor.key
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
    wanted = [tensor for tensor in _tensors(state) if tensor.key in saved]
    places = [tensor.data for tensor in wanted]
    with cpu_runtime.tensor_scope():
        loaded = dist_checkpointing.load({str(number): tensor for number, tensor in enumerate(wanted)}, str(path))
    for number, place in enumerate(places):
        values = loaded[str(number)]
        if values.data_ptr() != place.data_ptr():  # most are read in place
            place.copy_(values)
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
    """Sharded tensors that are views of the parameters."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {f"model{number}": chunk.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(chunks)}
    apply_factories(state)
    return state


def _tensors(state: dict) -> list[ShardedTensor]:
    return [item for item in nested_values(state) if isinstance(item, ShardedTensor)]


def _split_storages(state: dict, chunks: list[GPTModel]) -> None:
    """Give each tensor that is part of a parameter memory of its own, one parameter at a time."""
    parts: dict[int, list[ShardedTensor]] = {}
    for tensor in _tensors(state):
        parts.setdefault(tensor.data.untyped_storage().data_ptr(), []).append(tensor)
    for chunk in chunks:
        for parameter in chunk.parameters():
            own = parts.get(parameter.untyped_storage().data_ptr(), [])
            if len(own) > 1:
                for tensor in own:
                    tensor.data = tensor.data.detach().clone()
                parameter.data = parameter.data.new_empty(0)
