"""Which allocations of a step belong to the prefix state, and which do not."""
from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves

from allocation_tracker import Allocation, AllocationTracker
from megatron_longstraw.prefix.store import PrefixStore


class AllocationEvents(AllocationTracker):
    """Remembers every allocation, and which of them were a prefix state's."""

    def __init__(self):
        super().__init__()
        self._events: list[tuple[int, int]] = []
        """(number of an allocation, its bytes; negative when it dies), in order."""
        self._allocations: list[Allocation] = []
        self._numbers: dict[int, int] = {}
        self._of_state: set[int] = set()

    def _allocated(self, storage: torch.UntypedStorage, allocation: Allocation) -> None:
        self._numbers[storage._cdata] = len(self._allocations)
        self._events.append((len(self._allocations), allocation.nbytes))
        self._allocations.append(allocation)
        super()._allocated(storage, allocation)

    def _freed(self, key: int) -> None:
        number = self._numbers.pop(key)
        self._events.append((number, -self._allocations[number].nbytes))
        super()._freed(key)

    def mark_state(self, store: PrefixStore) -> None:
        """What the store holds now is the prefix state's."""
        for state in store.layers.values():
            tensors = (leaf for leaf in tree_leaves(vars(state)) if isinstance(leaf, torch.Tensor))
            self._of_state |= {self._numbers[tensor.untyped_storage()._cdata] for tensor in tensors}

    def largest_outside(self) -> dict[str, int]:
        """Bytes of each operator's largest allocation that is not the state's."""
        largest: dict[str, int] = {}
        for number, allocation in enumerate(self._allocations):
            if number not in self._of_state:
                largest[allocation.operator] = max(allocation.nbytes, largest.get(allocation.operator, 0))
        return largest

    def peak_outside(self) -> int:
        """Most bytes held at once that are not the state's."""
        held = peak = 0
        for number, num_bytes in self._events:
            if number not in self._of_state:
                held += num_bytes
                peak = max(peak, held)
        return peak
