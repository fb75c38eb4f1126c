"""Autograd graphs of a prompt's last chunks, kept from capture to the prefix backward.

A chunk whose graph is kept runs forward once: capture runs it under autograd, and the prefix backward only walks its
graph. Seeds are read at backward time, so nothing else changes.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Callable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_longstraw.prefix.microbatch import MicroBatch


@dataclass
class GraphBudget:
    """Bytes that the graphs of all stores at once may take on this rank."""

    limit_bytes: int
    held_bytes: int = 0


@dataclass
class ChunkGraphs:
    """The graphs of one store's last chunks, as many as fit.

    Chunks of one length have graphs of one size. So the first of those that will be walked back runs under autograd to
    show it, and then the last ones keep theirs.
    """

    walked_back: range
    """Chunks that get a prefix backward."""
    budget: GraphBudget
    known_storages: set[int]
    """Data pointers of storages that are there anyway: the parameters'."""
    agree: Callable[[int], int]
    """The least of a number over the ranks that run the chunks together, for they meet in every forward."""
    _first_kept: int | None = field(default=None, init=False)
    _kept: dict[int, tuple[Tensor, int]] = field(default_factory=dict, init=False)
    """Hidden states [s, b, h] with the graph behind them, and its bytes, by chunk."""

    def forward(self, mb: MicroBatch, run: Callable[[], Tensor]) -> Tensor:
        """Hidden states of a chunk: in capture by `run`, keeping the graph of the last ones; in the prefix backward with
        the graph kept then, else by `run`."""
        if not mb.appends:
            return self._take(mb.chunk_index) if mb.chunk_index in self._kept else run()
        measures = self._first_kept is None and mb.chunk_index == self.walked_back.start
        if not measures and (self._first_kept is None or mb.chunk_index < self._first_kept):
            return run()
        mb.grad = mb.seeded = True  # the backward of this very micro-batch is the chunk's
        with _SavedBytes(self.known_storages) as saved, torch.enable_grad():
            hidden = run()
            saved.count(hidden)
        if measures:
            free_bytes = self.budget.limit_bytes - self.budget.held_bytes
            fitting = min(len(self.walked_back), free_bytes // saved.nbytes)
            self._first_kept = self.walked_back.stop - self.agree(fitting)
        if mb.chunk_index >= self._first_kept:
            self._kept[mb.chunk_index] = hidden, saved.nbytes
            self.budget.held_bytes += saved.nbytes
        return hidden.detach()

    def keeps(self, chunk_index: int) -> bool:
        return chunk_index in self._kept

    def _take(self, chunk_index: int) -> Tensor:
        hidden, num_bytes = self._kept.pop(chunk_index)
        self.budget.held_bytes -= num_bytes
        return hidden

    def release(self) -> None:
        for chunk_index in list(self._kept):
            self._take(chunk_index)

    @property
    def nbytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._kept.values())


class _SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of the storages that the operations inside keep for their backward, each counted once."""

    def __init__(self, known_storages: set[int]):
        self._storages: dict[int, int] = {}
        self._known = known_storages
        super().__init__(self.count, lambda tensor: tensor)

    def __enter__(self) -> _SavedBytes:
        super().__enter__()
        return self

    def count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an operation that keeps its own result would keep itself

    @property
    def nbytes(self) -> int:
        return sum(self._storages.values())
