"""Prefix state of one layer on one rank.

`TokenState` is the shape of state that keeps a record per token (here K and V): fields [B, K, capacity, D] of
this rank's slices of every chunk, and a gradient buffer for the part that will be walked back. The schedule and
the algorithm only ever say append / blocks / add_grad / take_grad / release; what a layer keeps is this file's
business, and how its tensors are kept that of storage.py.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

import torch
from torch import Tensor

from megatron_longstraw.attention.merge import accumulation_dtype
from megatron_longstraw.prefix.storage import (
    DeviceBudget,
    DeviceMemory,
    HostMemory,
    Plane,
    Storage,
    StoredBytes,
    plane_bytes,
)


@dataclass(frozen=True)
class Block:
    """A run of stored tokens, [B, K, t, D] as they are read, and where its gradient goes."""

    k: Tensor
    v: Tensor
    begin: int
    end: int
    wants_grad: bool


class TokenState:
    """K, V of the stored tokens of B equally long prompts.

    Where the storage rounds K, V (bf16, fp8), everyone computes with the rounded values, the chunk that writes them
    included (`as_stored`), and the gradient is straight-through: dK, dV of the rounded values are taken for those of
    the values that were rounded.

    Args:
        capacity: tokens this rank will hold; storage is allocated once, at this size, on first append.
        grad_begin: first local token whose dK, dV are collected (`capacity`: none, the frozen mode).
        block_tokens: longest block handed to one attention call, so that no temporary grows with the prefix.
        storage: how the tensors are kept.
        budget: what the layers of a store may still keep on the device together; None: all of the storage's own.
    """

    def __init__(
        self,
        capacity: int,
        grad_begin: int,
        block_tokens: int,
        storage: Storage = Storage(),
        budget: DeviceBudget | None = None,
    ):
        self.capacity, self.grad_begin, self.block_tokens = capacity, grad_begin, block_tokens
        self._storage, self._codec = storage, storage.codec
        self._budget = budget or DeviceBudget(storage.device_bytes)
        self._kv: DeviceMemory | HostMemory | None = None
        self._grad: DeviceMemory | HostMemory | None = None
        self._kept: dict[int, tuple[Tensor, Tensor] | tuple[HostMemory, torch.Size]] = {}

    def append(self, begin: int, k_TBKD: Tensor, v_TBKD: Tensor) -> None:
        """Store the K, V rows [t, B, K, D] at local tokens [begin, begin + t). Writing twice is harmless."""
        end = begin + len(k_TBKD)
        assert end <= self.capacity, f"append of tokens {begin}..{end} to a state of {self.capacity}"
        k, v = (x.permute(1, 2, 0, 3) for x in (k_TBKD, v_TBKD))
        if self._kv is None:
            self._allocate(k, v)
        self._kv.write(begin, self._codec.encode(k) + self._codec.encode(v))

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        shapes = [(*x.shape[:2], self.capacity, x.shape[3]) for x in (k, v)]
        grad_dtype = self._storage.gradient_dtype(k.dtype)
        self._grad_planes = [
            ((*shape[:2], self.capacity - self.grad_begin, shape[3]), grad_dtype) for shape in shapes
        ]
        self._dtype, self._device = k.dtype, k.device
        self._kv = self._memory([plane for shape in shapes for plane in self._codec.planes(shape, k.dtype)])

    def _memory(self, planes: list[Plane], zero: bool = False) -> DeviceMemory | HostMemory:
        if self._budget.take(plane_bytes(planes)):
            return DeviceMemory(planes, self._device, zero)
        return HostMemory(planes, self._device, self.block_tokens, zero)

    def as_stored(self, x: Tensor) -> Tensor:
        """K or V [..., D] as readers of the state will see them."""
        return self._codec.decode(self._codec.encode(x), x.dtype)

    def blocks(self, upto: int) -> Iterator[Block]:
        """The first `upto` tokens in blocks that never straddle `grad_begin`. A block is valid until the next one is
        asked for."""
        ranges = list(self._ranges(upto))
        if not ranges:
            return
        for (begin, end), planes in zip(ranges, self._kv.blocks(ranges)):
            half = len(planes) // 2
            k, v = (self._codec.decode(part, self._dtype) for part in (planes[:half], planes[half:]))
            yield Block(k, v, begin, end, begin >= self.grad_begin)

    def _ranges(self, upto: int) -> Iterator[tuple[int, int]]:
        begin = 0
        while begin < upto:
            limit = upto if begin >= self.grad_begin else min(upto, self.grad_begin)
            end = min(begin + self.block_tokens, limit)
            yield begin, end
            begin = end

    def add_grad(self, block: Block, dk: Tensor, dv: Tensor) -> None:
        """Add one reader's dK, dV [B, K, t, D] of a block; buffers appear with the first reader."""
        if self._grad is None:
            self._grad = self._memory(self._grad_planes, zero=True)
        self._grad.add(block.begin - self.grad_begin, (dk, dv))

    def take_grad(self, begin: int, num_tokens: int) -> tuple[Tensor, Tensor] | None:
        """What all readers so far sent to local tokens [begin, begin + num_tokens): dK, dV [B, K, t, D] in the
        accumulation dtype, or None when nobody read them."""
        if self._grad is None or num_tokens == 0:
            return None
        dk, dv = self._grad.read(begin - self.grad_begin, begin - self.grad_begin + num_tokens)
        dtype = accumulation_dtype(self._dtype)
        return dk.to(dtype), dv.to(dtype)

    def keep_attention(self, chunk_index: int, out: Tensor, lse: Tensor) -> None:
        """Remember a chunk's merged attention, this rank's rows: out [s, b, N, D], lse [s, b, N] float32."""
        if not self._storage.out_on_host:
            self._kept[chunk_index] = (out, lse)
            return
        rows = [out.reshape(1, 1, -1, out.shape[-1]), lse.reshape(1, 1, -1, 1)]
        memory = HostMemory([(x.shape, x.dtype) for x in rows], out.device, cell_tokens=rows[0].shape[2])
        memory.write(0, rows)
        self._kept[chunk_index] = (memory, out.shape)

    def kept_attention(self, chunk_index: int) -> tuple[Tensor, Tensor] | None:
        """(out, lse) of the chunk on the device, or None."""
        kept = self._kept.get(chunk_index)
        if kept is None or not self._storage.out_on_host:
            return kept
        memory, shape = kept
        out, lse = memory.read(0, shape[:3].numel())
        return out.view(shape), lse.view(shape[:3])

    def drop_attention(self, chunk_index: int) -> None:
        self._kept.pop(chunk_index, None)

    def release(self) -> None:
        self._kv = self._grad = None
        self._kept.clear()

    @property
    def nbytes(self) -> StoredBytes:
        total = sum((memory.nbytes for memory in (self._kv, self._grad) if memory is not None), StoredBytes())
        for kept in self._kept.values():
            if isinstance(kept[0], HostMemory):
                total += kept[0].nbytes
            else:
                total += StoredBytes(device=sum(x.numel() * x.element_size() for x in kept))
        return total
