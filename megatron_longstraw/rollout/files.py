"""Rollout files of a run: groups of all data-parallel ranks into one file, and a run's reader of one."""
from __future__ import annotations

import dataclasses
from pathlib import Path

import torch.distributed as dist

from megatron_longstraw.config import Config
from megatron_longstraw.data.rollout_files import RolloutReader, RolloutWriter
from megatron_longstraw.data.rollout_rows import Limits
from megatron_longstraw.data.task import Task
from megatron_longstraw.disk import writing
from megatron_longstraw.mcore.parallel import Layout
from megatron_longstraw.types import PromptGroup


class RolloutSaver:
    """Writes each step's groups of all ranks, in the order of the batch, from rank 0, after those of `steps_done`.

    Raises:
        DiskError: on rank 0, here or when a step is written: the file cannot be.
    """

    def __init__(self, layout: Layout, path: Path, steps_done: int = 0):
        self.layout, self.path = layout, path
        with writing(path, "--run-dir"):
            self.writer = RolloutWriter(path, steps_done) if dist.get_rank() == 0 else None

    def __call__(self, step: int, groups: list[PromptGroup]) -> None:
        """`groups`: the global batch, alike on every rank but for the branches, which the owning replica has."""
        # The replicas' leaders form one data-parallel group; their peers hold the same branches.
        if not self.layout.is_cell_leader:
            return
        whole = gather_groups(self.layout, groups)
        if self.writer is not None:
            with writing(self.path, "--run-dir"):
                self.writer.write(step, whole)


def gather_groups(layout: Layout, groups: list[PromptGroup]) -> list[PromptGroup]:
    """The global batch with all branches, on the first rank of each data-parallel group; elsewhere unchanged."""
    if layout.dp_size == 1:
        return groups
    own = [group.branches for group in groups]
    parts = [None] * layout.dp_size if layout.dp_rank == 0 else None
    first = dist.get_process_group_ranks(layout.groups.dp)[0]
    dist.gather_object(own, parts, dst=first, group=layout.groups.dp)
    if parts is None:
        return groups
    merged = [next(filter(None, branches), []) for branches in zip(*parts)]
    return [dataclasses.replace(group, branches=branches) for group, branches in zip(groups, merged)]


def open_rollouts(config: Config, task: Task | None) -> RolloutReader:
    """The reader of `--rollout-file`; `task`: the run's prompts, if it has any, which the file's must equal.

    Raises:
        RowError: the file cannot be read, its last row is broken, or it ends before the run does.
    """
    reader = RolloutReader(config.data.rollout_file, config.data.max_row_bytes, Limits.of(config), task)
    reader.check_steps(0, config.run.train_iters)
    return reader
