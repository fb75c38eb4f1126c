"""Megatron checkpoints (dist_checkpointing, format torch_dist): readable under any other layout.

A run's own checkpoints are trusted input: torch's distributed format unpickles its metadata.
"""
from __future__ import annotations

import multiprocessing
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as _torch_dist  # noqa: F401, else imported too late
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.models.gpt import GPTModel

from megatron_longstraw.config import ConfigError, ModelConfig
from megatron_longstraw.interruption import end_with_parent
from megatron_longstraw.mcore import checkpoint_folder, cpu_runtime
from megatron_longstraw.mcore.checkpoint_folder import RELEASE, TRACKER, Checkpoint
from megatron_longstraw.mcore.parameters import named_shards

MODEL_TOML = "model.toml"


def save_weights(chunks: list[GPTModel], folder: str | Path, model_toml: str) -> Path:
    """Write the weights as the checkpoint `release` of a folder; a call of all ranks.

    The parameters are given up (left empty): Megatron saves gate and up projections as two tensors, and copies of
    all of them at once would need half as much memory again.

    Args:
        model_toml: the [model] section they belong to, kept beside them.

    Returns: the checkpoint's own folder.

    Raises:
        ConfigError: the folder holds a checkpoint already.
    """
    folder = Path(folder)
    check_no_checkpoint(folder)
    together(lambda: folder.mkdir(parents=True, exist_ok=True))
    state = model_state(chunks)
    apply_factories(state)
    _split_storages(state, chunks)
    write({"checkpoint_version": 3.0, "iteration": 0, **state}, folder, None, {})
    if dist.get_rank() == 0:
        (folder / MODEL_TOML).write_text(model_toml, encoding="utf-8")
    dist.barrier()
    return folder / RELEASE


def write(
    state: dict[str, Any], folder: Path, iteration: int | None, facts: dict[str, Any], *, in_background: bool = False
) -> AsyncRequest | None:
    """Write a sharded state as a checkpoint of `folder`, which exists; a call of all ranks.

    Returns: with `in_background`, the request to hand to Megatron's AsyncCallsQueue, which names the checkpoint when
        all ranks have written their part.
    """
    partial = together(lambda: checkpoint_folder.begin(folder, iteration))
    _own_results_queue()
    with cpu_runtime.tensor_scope():
        request = dist_checkpointing.save(state, str(partial), async_sharded_save=in_background)
    if request is not None:
        request.add_finalize_fn(lambda: _publish(folder, iteration, facts))
        return request
    _publish(folder, iteration, facts)
    return None


def _own_results_queue() -> None:
    """Megatron collects results of writing in a process that it starts once and that would outlive a killed rank
    (strategies/filesystem_async.py:51-56); this one ends with the rank."""
    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        manager.start(end_with_parent)
        filesystem_async._results_queue = manager.Queue()


def _publish(folder: Path, iteration: int | None, facts: dict[str, Any]) -> None:
    partial = checkpoint_folder.partial_path(folder, iteration)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, checkpoint_folder.measure(partial, dist.get_rank(), dist.get_world_size()))
    files = {name: fact for part in parts for name, fact in part.items()}
    together(lambda: checkpoint_folder.publish(folder, iteration, files, facts))


def check_no_checkpoint(folder: Path) -> None:
    """Raises:
    ConfigError: the folder holds a checkpoint already; nothing is overwritten.
    """
    if (folder / TRACKER).exists() or (folder / RELEASE).exists():
        raise ConfigError([f"{folder} holds a checkpoint already, and nothing is overwritten: change --save"])


def newest(folder: str | Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest undamaged checkpoint of a folder, found by all ranks together; see `checkpoint_folder.newest_whole`."""

    def examine(checkpoint: Checkpoint) -> str | None:
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, checkpoint.damage(dist.get_rank(), dist.get_world_size()))
        return next(filter(None, problems), None)

    return checkpoint_folder.newest_whole(folder, examine)


def require_newest(folder: str | Path) -> tuple[Checkpoint, list[str]]:
    """Raises:
    ConfigError: there is no whole checkpoint.
    """
    found, notes = newest(folder)
    if found is None:
        raise ConfigError([f"{Path(folder) / TRACKER} is missing, so {folder} holds no checkpoint; change --load"])
    return found, notes


def saved_dtypes(path: Path) -> set[torch.dtype]:
    """Of a checkpoint's weights."""
    saved = dist_checkpointing.load_tensors_metadata(str(path))
    return {tensor.dtype for key, tensor in saved.items() if not key.startswith("optimizer.")}


@torch.no_grad()
def load_weights(chunks: list[GPTModel], model: ModelConfig, path: Path, missing_ok: bool = False) -> list[str]:
    """Set every local parameter from a checkpoint saved under any layout.

    Args:
        missing_ok: parameters that the checkpoint lacks stay as they are.

    Returns: names of parameters that the checkpoint lacks.

    Raises:
        ConfigError: it is of another model.
    """
    state = model_state(chunks)
    apply_factories(state)
    saved = dist_checkpointing.load_tensors_metadata(str(path))
    problems, missing = [], []
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
    clear_padded_rows(chunks, model)
    return sorted(set(missing))


@torch.no_grad()
def clear_padded_rows(chunks: list[GPTModel], model: ModelConfig) -> None:
    """Vocabulary padding differs between layouts: rows that a checkpoint had no numbers for are undefined."""
    for shard, parameter in named_shards(chunks, model):
        parameter[shard.num_unpadded_rows :].zero_()


def model_state(chunks: list[GPTModel]) -> dict[str, Any]:
    """Sharded tensors, and factories of them, whose data are the parameters themselves."""
    return {
        f"model{number}": chunk.sharded_state_dict(metadata=state_metadata()) for number, chunk in enumerate(chunks)
    }


def state_metadata() -> dict[str, Any]:
    """What Megatron wants to know wherever a sharded state is made. The optimizer's type is the one of those that
    load under another layout which also works without Transformer Engine."""
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }


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


def together(action: Callable[[], Any]) -> Any:
    """Do it on rank 0; its result, or what it raised, on every rank, so that none waits for the others."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except OSError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
