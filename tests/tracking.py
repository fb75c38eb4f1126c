"""What tensors the operations inside a `with` block allocate, and which kernels they launch."""
from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tracker(TorchDispatchMode):
    """Sees every operation, backward included. Views allocate nothing and are not counted."""

    def __init__(self):
        super().__init__()
        self.largest_bytes = 0
        self.launches: dict = {}
        self.allocated: list[tuple[object, tuple[int, ...]]] = []
        """(operation, shape) of every tensor made."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.launches[func] = self.launches.get(func, 0) + 1
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.largest_bytes = max(self.largest_bytes, x.untyped_storage().nbytes())
                self.allocated.append((func, tuple(x.shape)))
        return result

    @property
    def attention_forwards(self) -> int:
        return self.launches.get(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, 0)

    def rows_with_columns(self, columns: int) -> list[int]:
        """Rows of every matrix made with this many columns."""
        return [shape[0] for _, shape in self.allocated if len(shape) == 2 and shape[1] == columns]

    def rows_multiplied_to(self, columns: int) -> int:
        """Rows of all matrix products with this many columns."""
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return sum(shape[0] for func, shape in self.allocated if func in products and shape[1] == columns)
