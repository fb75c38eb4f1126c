"""Which allocations of a step belong to the prefix state, and which do not."""
from __future__ import annotations

from typing import Iterator

import torch
from torch.utils._pytree import tree_leaves

from allocation_tracker import Allocation, AllocationTracker
from megatron_longstraw.prefix.storage import DeviceMemory, HostMemory
from megatron_longstraw.prefix.store import PrefixStore


def _tensors_of(tree) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, (DeviceMemory, HostMemory)):
            yield from _tensors_of(leaf.planes)


class AllocationEvents(AllocationTracker):
    """Remembers every allocation, and which of them were a prefix state's."""

    def __init__(self):
        super().__init__()
        self._events: list[tuple[int, int]] = []
        """(number of an allocation, its bytes; negative when it dies), in order."""
        self._allocations: list[Allocation] = []
        self._numbers: dict[int, int] = {}
        self._of_state: set[int] = set()
        self._calls: dict[str, int] = {}

    def _allocated(self, storage: torch.UntypedStorage, allocation: Allocation) -> None:
        self._numbers[storage._cdata] = len(self._allocations)
        self._events.append((len(self._allocations), allocation.nbytes))
        self._allocations.append(allocation)
        super()._allocated(storage, allocation)

    def _freed(self, key: int) -> None:
        number = self._numbers.pop(key)
        self._events.append((number, -self._allocations[number].nbytes))
        super()._freed(key)

    def begin(self, call: str) -> None:
        """What comes is this call's."""
        self._calls[call] = len(self._events)

    def mark_state(self, store: PrefixStore) -> None:
        """What the store holds now is the prefix state's."""
        for state in store.layers.values():
            self._of_state |= {self._numbers[tensor.untyped_storage()._cdata] for tensor in _tensors_of(vars(state))}

    def largest_outside(self) -> dict[str, int]:
        """Bytes of each operator's largest allocation that is not the state's."""
        largest: dict[str, int] = {}
        for number, allocation in enumerate(self._allocations):
            if number not in self._of_state:
                largest[allocation.operator] = max(allocation.nbytes, largest.get(allocation.operator, 0))
        return largest

    def peaks_outside(self) -> dict[str, int]:
        """Most bytes held at once that are not the state's, by call."""
        ends = [*list(self._calls.values())[1:], len(self._events)]
        held, peaks = 0, {}
        for (call, begin), end in zip(self._calls.items(), ends):
            peaks[call] = held
            for number, num_bytes in self._events[begin:end]:
                held += num_bytes if number not in self._of_state else 0
                peaks[call] = max(peaks[call], held)
        return peaks
