"""Prompts and branches as micro-batch rows: which branch sits where, and this cp rank's slice of the ids."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_longstraw.context_parallel.layout import ChunkPlan, SequenceSlice, plan_chunks, slice_sequence
from megatron_longstraw.mcore.parallel import Layout
from megatron_longstraw.types import PromptGroup


@dataclass
class PromptBatch:
    """Groups whose prompts have one length and are captured together (usually a single group)."""

    groups: list[PromptGroup]

    def __post_init__(self):
        lengths = {group.num_prompt_tokens for group in self.groups}
        assert len(lengths) == 1, f"prompts of a batch must be equally long, got {sorted(lengths)}"

    @property
    def num_prompts(self) -> int:
        return len(self.groups)

    @property
    def num_prefix_tokens(self) -> int:
        return self.groups[0].num_prefix_tokens

    def prefix_ids(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """int64 [B, P - 1], or of it the tokens from `begin` to before `end`."""
        return np.stack([group.prompt_ids[:-1][begin:end] for group in self.groups])

    def boundary_ids(self) -> np.ndarray:
        """int64 [B]: the last prompt tokens, each branch's first input."""
        return np.array([group.prompt_ids[-1] for group in self.groups])


def batch_prompts(groups: list[PromptGroup], prompts_per_microbatch: int) -> list[PromptBatch]:
    """Groups of equal prompt length in batches of at most `prompts_per_microbatch`, in order of first appearance."""
    by_length: dict[int, list[PromptGroup]] = {}
    for group in groups:
        by_length.setdefault(group.num_prompt_tokens, []).append(group)
    step = prompts_per_microbatch
    return [
        PromptBatch(same[begin : begin + step]) for same in by_length.values() for begin in range(0, len(same), step)
    ]


@dataclass(frozen=True)
class BranchPack:
    """Branches of one micro-batch; `rows[i]` is (prompt, branch) or None for a filler row."""

    rows: tuple[tuple[int, int] | None, ...]
    num_tokens: int
    """Longest branch: all rows are padded to it at the end."""


def pack_branches(batch: PromptBatch, branches_per_microbatch: int) -> list[BranchPack]:
    """Branches by falling length, up to `branches_per_microbatch` per prompt and micro-batch, prompt-major.

    Empty responses are left out: they carry no token.
    """
    order = []
    for prompt, group in enumerate(batch.groups):
        lengths = [branch.num_tokens for branch in group.branches]
        present = [index for index in range(len(lengths)) if lengths[index]]
        order.append([(prompt, index) for index in sorted(present, key=lambda i: (-lengths[i], i))])
    packs = []
    for begin in range(0, max(map(len, order), default=0), branches_per_microbatch):
        members = [rows[begin : begin + branches_per_microbatch] for rows in order]
        width = max(map(len, members))
        rows = tuple(row for own in members for row in own + [None] * (width - len(own)))
        longest = max(batch.groups[row[0]].branches[row[1]].num_tokens for row in rows if row)
        packs.append(BranchPack(rows, longest))
    return packs


def branch_ids(batch: PromptBatch, pack: BranchPack) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [boundary token] + response[:-1] and labels (the response), int64 [b, T], padded with 0 at the end."""
    inputs = np.zeros((len(pack.rows), pack.num_tokens), dtype=np.int64)
    labels = np.zeros_like(inputs)
    for row, place in enumerate(pack.rows):
        if place is None:
            continue
        group = batch.groups[place[0]]
        response = group.branches[place[1]].response_ids
        labels[row, : len(response)] = response
        inputs[row, 0] = group.prompt_ids[-1]
        inputs[row, 1 : len(response)] = response[:-1]
    return inputs, labels


def pack_values(pack: BranchPack, values: dict[tuple[int, int], np.ndarray]) -> np.ndarray:
    """Per-token float32 values of the branches as rows [b, T]; fillers and pads are 0."""
    table = np.zeros((len(pack.rows), pack.num_tokens), dtype=np.float32)
    for row, place in enumerate(pack.rows):
        if place is not None:
            table[row, : len(values[place])] = values[place]
    return table


def chunk_plan(num_tokens: int, chunk_tokens: int, layout: Layout, row_multiple: int) -> ChunkPlan:
    return plan_chunks(num_tokens, chunk_tokens, cp_rank=layout.cp_rank, cp_size=layout.cp_size, multiple=row_multiple)


def sequence_slice(start: int, num_tokens: int, layout: Layout) -> SequenceSlice:
    return slice_sequence(
        start, num_tokens, cp_rank=layout.cp_rank, cp_size=layout.cp_size, multiple=layout.row_multiple
    )


def local_columns(values: np.ndarray, rows: SequenceSlice) -> np.ndarray:
    """This cp rank's columns [b, s] of [b, num_tokens], zero-padded at the end; a view where that needs no pad."""
    begin = rows.cp_rank * rows.local_tokens
    own = values[:, begin : begin + rows.local_tokens]
    missing = rows.local_tokens - own.shape[1]
    return np.pad(own, ((0, 0), (0, missing))) if missing else own


def local_rows(values: np.ndarray, rows: SequenceSlice, device: torch.device) -> Tensor:
    """`local_columns` as a tensor of its own on the device."""
    return torch.tensor(local_columns(values, rows), device=device)
