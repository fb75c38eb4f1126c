"""Work of a piece of code, counted by operator: multiplications, pairs of tokens, bytes from other ranks.

    with WorkCounter() as counter:
        loss().backward()
    counter.work

The numbers are exact and repeatable, forward, backward and activation recompute included.
"""
from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_c10d = torch.ops.c10d
_ATTENTION = "_scaled_dot_product_"


@dataclass
class Work:
    matmul_flops: int = 0
    """Of matrix products outside attention; a multiplication and an addition are two."""
    attention_pairs: int = 0
    """Query-key pairs of attention forward, over batch and query heads."""
    attention_backward_pairs: int = 0
    received_bytes: int = 0
    """What this rank has to get from others in collectives: of an all-gather what is not its own, of a
    reduce-scatter its share from each, of an all-reduce both."""
    collectives: int = 0

    def __sub__(self, other: Work) -> Work:
        return Work(**{name: value - getattr(other, name) for name, value in asdict(self).items()})


class WorkCounter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._collective(func, args)
        elif func._opname.startswith(_ATTENTION):
            self._attention(func, args)
        elif func._overloadpacket in flop_registry:
            self.work.matmul_flops += int(flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result))
        return result

    def _attention(self, func, args) -> None:
        backward = func._opname.endswith("_backward")
        q, k = args[1:3] if backward else args[:2]
        batch, heads, rows, columns = *q.shape[:3], k.shape[2]
        arguments = {argument.name: value for argument, value in zip(func._schema.arguments, args)}
        pairs = rows * (rows + 1) // 2 if arguments.get("is_causal") else rows * columns
        if backward:
            self.work.attention_backward_pairs += batch * heads * pairs
        else:
            self.work.attention_pairs += batch * heads * pairs

    def _collective(self, func, args) -> None:
        name = func._opname
        size = next((x.size() for x in map(_group_of, args) if x is not None), 1)
        if name == "_allgather_base_":
            received = _nbytes(args[0]) - _nbytes(args[1])
        elif name == "_reduce_scatter_base_":
            received = _nbytes(args[1]) - _nbytes(args[0])
        elif name == "allreduce_":
            received = 2 * _nbytes(args[0]) * (size - 1) // size
        else:
            return  # broadcasts, barriers and hand-overs of tables, none of which grows with the prompt
        self.work.received_bytes += received
        self.work.collectives += 1


def _group_of(argument):
    """The process group behind an argument of a collective, boxed for the operator."""
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        return torch.distributed.ProcessGroup.unbox(argument)
    except RuntimeError:
        return None  # the reduce operation is boxed as well


def _nbytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in ([tensors] if isinstance(tensors, torch.Tensor) else tensors))
