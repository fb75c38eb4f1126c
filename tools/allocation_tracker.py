"""Peak tensor bytes of a piece of code, counted by allocation instead of by resident-set size.

    with AllocationTracker() as tracker:
        loss().backward()
    tracker.peak_bytes, tracker.largest

Every operator's fresh storages are added when they appear and subtracted when they die, so the numbers are exact
and repeatable, forward, backward and activation recompute included. What is not seen: memory a kernel allocates
and frees inside one operator, and memory that is not a tensor's (NumPy arrays, also where a tensor wraps one).
"""
from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten


@dataclass(frozen=True)
class Allocation:
    """One storage as it was allocated."""

    nbytes: int = 0
    operator: str = ""
    shape: tuple[int, ...] = ()


class AllocationTracker(TorchDispatchMode):
    """Bytes of the live storages that operators allocated since the tracker started, and their peak.

    A storage counts once, however many views it has; views and in-place results alias an input's storage and so
    are no allocation, which also leaves out everything that existed before the start (weights, gradient buffers).
    A storage counts until it dies, also after the `with` block. Autograd hands the mode on to backward: on the
    CPU it runs in the calling thread, and on other devices in threads that inherit the mode.
    """

    def __init__(self):
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.largest = Allocation()
        """Largest single allocation: what a test reads that no temporary grows with some length."""
        self._storages: dict[int, tuple[weakref.ref, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # torch.tensor(...) builds its tensor unseen and shows it to lift_fresh: there the input is the fresh one.
        fresh_input = func is _aten.lift_fresh.default
        before = set() if fresh_input else {storage._cdata for storage, _ in _storages_of((args, kwargs))}
        result = func(*args, **kwargs)
        for storage, shape in _storages_of(result):
            if storage._cdata in self._storages:
                self._resized(storage)
            elif storage._cdata not in before:
                self._allocated(storage, Allocation(storage.nbytes(), str(func), shape))
        return result

    def _allocated(self, storage: torch.UntypedStorage, allocation: Allocation) -> None:
        key = storage._cdata
        self._storages[key] = weakref.ref(storage, lambda _: self._freed(key)), allocation.nbytes
        if allocation.nbytes > self.largest.nbytes:
            self.largest = allocation
        self._grow(allocation.nbytes)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        reference, nbytes = self._storages[storage._cdata]
        if storage.nbytes() != nbytes:
            self._storages[storage._cdata] = reference, storage.nbytes()
            self._grow(storage.nbytes() - nbytes)

    def _freed(self, key: int) -> None:
        self.live_bytes -= self._storages.pop(key)[1]

    def _grow(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _storages_of(tree):
    """(storage, tensor shape) of every tensor in nested arguments or results."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            yield leaf.untyped_storage(), tuple(leaf.shape)


def peak_bytes_of(step) -> int:
    """Peak tensor bytes of a call above what exists before it; from the allocator where that keeps count."""
    if not torch.cuda.is_available():
        with AllocationTracker() as tracker:
            step()
        return tracker.peak_bytes
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
