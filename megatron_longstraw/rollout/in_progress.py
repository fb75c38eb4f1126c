"""Finished groups of a step that is not: their scored responses go to the disk as they come, so a stop loses none.

    SAVE/in_progress/step_0000012-1f0c.../9b2e....jsonl      one group, in the format of rollout files

A folder belongs to one step under one set of weights, layout, way of sampling and reward function; under another it is
not found, and the groups are sampled again (each is keyed by what it is) and scored again. A group that is found is not
scored again; the global random generators, which a reward function may draw from, are then set to what they were after
it was (9b2e....random.json).
"""
from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import torch.distributed as dist

from megatron_longstraw import random_states
from megatron_longstraw.data.rollout_files import RolloutReader
from megatron_longstraw.data.rollout_groups import format_group
from megatron_longstraw.disk import writing
from megatron_longstraw.mcore.packing import PromptBatch
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.types import PromptGroup, prompt_digest

FOLDER = "in_progress"


class FinishedGroups:
    """Responses of the current step's groups on the disk, with log-probs and rewards, in a folder that exists.

    Raises:
        DiskError: when a step begins or a group is kept, on the rank that cannot write it.
    """

    def __init__(self, policy: Policy, save: str | Path):
        self.policy, self.root = policy, Path(save) / FOLDER
        self.folder: Path | None = None

    def begin(self, step: int, scoring: str) -> None:
        """Start a step: what others left is removed. A call of all ranks.

        Args:
            scoring: the identity of what gives the rewards.
        """
        config = self.policy.config
        parts: list[tuple] = [()] * dist.get_world_size()
        dist.all_gather_object(parts, (self.policy.checksum(), scoring))
        key = hashlib.sha256(repr((parts, config.rollout, config.run.seed)).encode()).hexdigest()[:12]
        self.folder = self.root / f"step_{step:07d}-{key}"
        if dist.get_rank() == 0:
            with writing(self.root, "--save"):
                self.root.mkdir(exist_ok=True)
                self.folder.mkdir(exist_ok=True)
                for other in self.root.iterdir():
                    if other != self.folder:
                        shutil.rmtree(other)
        dist.barrier()

    def load(self, step: int, batch: PromptBatch | None) -> bool:
        """Fill a batch with the scored responses it had, alike on all ranks of the replica; False if any group has none."""
        if batch is None:
            return False
        paths = [self._path(group) for group in batch.groups]
        if not self._agree(all(path.exists() for path in paths)):
            return False
        if self.policy.layout.is_cell_leader:  # which scores
            random_states.set_states(random_states.from_json(_states_of(paths[-1]).read_text()))
        for group, path in zip(batch.groups, paths):
            (saved,) = RolloutReader(path, self.policy.config.data.max_row_bytes).prompts(step, 1)
            group.branches = saved.branches
        return True

    def keep(self, step: int, batch: PromptBatch | None) -> None:
        """Write the scored responses of a batch."""
        if batch is None or not self.policy.layout.is_cell_leader:
            return
        states = random_states.to_json(random_states.get_states())
        for group in batch.groups:
            path = self._path(group)
            partial = path.with_suffix(".partial")
            with writing(self.root, "--save"):
                _states_of(path).write_text(states)
                partial.write_bytes(format_group(step, group))
                os.replace(partial, path)  # with it there, the states are whole too

    def _agree(self, found: bool) -> bool:
        """Ranks of a replica see one folder, but not all at the same moment."""
        answer = [found]
        leader = dist.get_process_group_ranks(self.policy.layout.cell)[0]
        dist.broadcast_object_list(answer, src=leader, group=self.policy.layout.cell)
        return answer[0]

    def _path(self, group: PromptGroup) -> Path:
        name = hashlib.sha256(f"{group.group_id!r}/{prompt_digest(group.prompt_ids)}".encode()).hexdigest()[:32]
        return self.folder / f"{name}.jsonl"


def _states_of(path: Path) -> Path:
    return path.with_suffix(".random.json")
