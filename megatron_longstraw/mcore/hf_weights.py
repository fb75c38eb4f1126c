"""Weights from and to a Hugging Face folder, under any layout: each rank reads and writes its own blocks only."""
from __future__ import annotations

import shutil
from pathlib import Path
from typing import Callable

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megatron_longstraw.config import ConfigError, ModelConfig
from megatron_longstraw.convert.errors import FolderError
from megatron_longstraw.convert.folder import HFFolder
from megatron_longstraw.convert.safetensors_files import TensorFilesWriter
from megatron_longstraw.mcore.parameters import named_shards


@torch.no_grad()
def load_hf(chunks: list[GPTModel], model: ModelConfig, folder: HFFolder) -> None:
    """Set every local parameter from the folder, in the parameter's dtype; padded vocabulary rows become zero.

    Raises:
        ConfigError: the model has parameters that the folder's family knows nothing of.
        FolderError: a tensor holds NaN or infinity.
    """
    shards = list(named_shards(chunks, model))
    foreign = sorted({shard.name for shard, _ in shards} - folder.parameter_names)
    if foreign:
        raise ConfigError(
            [
                f"the model has parameters such as {foreign[0]}, which a {folder.config['model_type']} folder does not "
                f"hold; leave flags that change the model's shape out beside --hf-checkpoint"
            ]
        )
    for shard, parameter in shards:
        covered = 0
        for piece in folder.pieces(shard):
            block = parameter[piece.target]
            block.copy_(folder.read(piece))
            covered += block.numel()
        if covered < parameter.numel():
            # Only the vocabulary is padded.
            parameter[shard.num_unpadded_rows :].zero_()
    folder.files.close()


def save_hf(chunks: list[GPTModel], model: ModelConfig, folder: HFFolder, target: str | Path) -> list[str]:
    """Write the model as a copy of `folder` with the trained weights in it; a call of all ranks.

    Tensors keep the folder's names, files and dtypes; other files are copied. The target appears under its name only
    when it is whole.

    Returns: lines about what differs from a plain copy (rank 0).

    Raises:
        FolderError: the target exists already, or something was not written.
        OSError: the disk is full or may not be written.
    """
    target = Path(target)
    partial = target.with_name(f".{target.name}.partial")
    writer = TensorFilesWriter(folder.files, partial)
    notes: list[str] = []

    def begin():
        check_target(target)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        notes.extend(folder.copy_side_files(partial, model))
        writer.create()

    def end(written: list[dict[str, int]]):
        totals: dict[str, int] = {}
        for part in written:
            for name, count in part.items():
                totals[name] = totals.get(name, 0) + count
        missing = writer.missing(totals)
        if missing:
            raise FolderError(target, missing)
        partial.rename(target)

    def fill():
        for shard, parameter in owned:
            for piece in folder.exported_pieces(shard):
                writer.write(piece.name, piece.source, parameter[piece.target])
        if dist.get_rank() == 0:
            for name in folder.extra:
                writer.copy(name)
                notes.append(f"{name}: copied from {folder.path}")

    try:
        _on_rank_0(begin)
        owned = list(_owned_shards(chunks, model))
        _on_every_rank(fill, writer.close)
        written: list[dict[str, int]] = [{}] * dist.get_world_size()
        dist.all_gather_object(written, writer.written_bytes)
        _on_rank_0(lambda: end(written))
    except (OSError, FolderError):
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return notes


def check_target(target: Path) -> None:
    """Raises:
    FolderError: the folder exists already; nothing is overwritten.
    """
    if target.exists():
        raise FolderError(target, ["exists already, and nothing is overwritten: remove it or name another folder"])


def _owned_shards(chunks: list[GPTModel], model: ModelConfig):
    """Local parameters that no lower rank holds too."""
    shards = list(named_shards(chunks, model))
    keys: list[list[tuple]] = [[]] * dist.get_world_size()
    dist.all_gather_object(keys, [shard.key for shard, _ in shards])
    taken = {key for part in keys[: dist.get_rank()] for key in part}
    for shard, parameter in shards:
        if shard.key not in taken:
            taken.add(shard.key)
            yield shard, parameter


def _on_rank_0(action: Callable[[], None]) -> None:
    """Run it there; what it raises is raised on every rank, so that none waits for the others."""
    outcome: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except (OSError, FolderError) as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]


def _on_every_rank(action: Callable[[], None], close: Callable[[], None]) -> None:
    """Run both; what any rank's raise is raised on every rank."""
    own: OSError | None = None
    try:
        try:
            action()
        finally:
            close()
    except OSError as error:
        own = error
    errors: list[OSError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, own)
    for error in filter(None, errors):
        raise error
