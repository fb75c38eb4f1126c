"""Prefix state of one layer on one rank.

`TokenState` is the shape of state that keeps a record per token (here K and V): fields [B, K, capacity, D] of
this rank's slices of every chunk, and a float32 gradient buffer for the part that will be walked back. The
schedule and the algorithm only ever say append / blocks / add_grad / take_grad / release; what a layer keeps
is this file's business.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

import torch
from torch import Tensor

from megatron_longstraw.attention.merge import accumulation_dtype


@dataclass(frozen=True)
class Block:
    """A run of stored tokens, [B, K, t, D] views, and where its gradient goes."""

    k: Tensor
    v: Tensor
    begin: int
    end: int
    wants_grad: bool


class TokenState:
    """K, V of the stored tokens of B equally long prompts.

    Args:
        capacity: tokens this rank will hold; storage is allocated once, at this size, on first append.
        grad_begin: first local token whose dK, dV are collected (`capacity`: none, the frozen mode).
        block_tokens: longest block handed to one attention call, so that no temporary grows with the prefix.
    """

    def __init__(self, capacity: int, grad_begin: int, block_tokens: int):
        self.capacity, self.grad_begin, self.block_tokens = capacity, grad_begin, block_tokens
        self._k = self._v = None
        self._dk = self._dv = None
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, begin: int, k_TBKD: Tensor, v_TBKD: Tensor) -> None:
        """Store the K, V rows [t, B, K, D] at local tokens [begin, begin + t). Writing twice is harmless."""
        num_tokens, batch, heads, dim = k_TBKD.shape
        if self._k is None:
            self._k = k_TBKD.new_empty((batch, heads, self.capacity, dim))
            self._v = v_TBKD.new_empty((batch, heads, self.capacity, v_TBKD.shape[-1]))
        end = begin + num_tokens
        assert end <= self.capacity, f"append of tokens {begin}..{end} to a state of {self.capacity}"
        self._k[:, :, begin:end] = k_TBKD.permute(1, 2, 0, 3)
        self._v[:, :, begin:end] = v_TBKD.permute(1, 2, 0, 3)

    def blocks(self, upto: int) -> Iterator[Block]:
        """The first `upto` tokens in blocks that never straddle `grad_begin`."""
        begin = 0
        while begin < upto:
            limit = upto if begin >= self.grad_begin else min(upto, self.grad_begin)
            end = min(begin + self.block_tokens, limit)
            yield Block(self._k[:, :, begin:end], self._v[:, :, begin:end], begin, end, begin >= self.grad_begin)
            begin = end

    def add_grad(self, block: Block, dk: Tensor, dv: Tensor) -> None:
        """Add one reader's dK, dV [B, K, t, D] of a block; buffers appear with the first reader."""
        if self._dk is None:
            shape = list(self._k.shape)
            shape[2] = self.capacity - self.grad_begin
            dtype = accumulation_dtype(self._k.dtype)
            self._dk = torch.zeros(shape, dtype=dtype, device=self._k.device)
            self._dv = torch.zeros([*shape[:3], self._v.shape[3]], dtype=dtype, device=self._v.device)
        rows = slice(block.begin - self.grad_begin, block.end - self.grad_begin)
        self._dk[:, :, rows] += dk
        self._dv[:, :, rows] += dv

    def take_grad(self, begin: int, num_tokens: int) -> tuple[Tensor, Tensor] | None:
        """What all readers so far sent to local tokens [begin, begin + num_tokens): dK, dV [B, K, t, D] in the
        accumulation dtype, or None when nobody read them."""
        if self._dk is None or num_tokens == 0:
            return None
        rows = slice(begin - self.grad_begin, begin - self.grad_begin + num_tokens)
        return self._dk[:, :, rows], self._dv[:, :, rows]

    def keep_attention(self, chunk_index: int, out: Tensor, lse: Tensor) -> None:
        """Remember a chunk's merged attention, this rank's rows: out [s, b, N, D], lse [s, b, N] float32."""
        self._kept[chunk_index] = (out, lse)

    def kept_attention(self, chunk_index: int) -> tuple[Tensor, Tensor] | None:
        return self._kept.get(chunk_index)

    def drop_attention(self, chunk_index: int) -> None:
        self._kept.pop(chunk_index, None)

    def release(self) -> None:
        self._k = self._v = self._dk = self._dv = None
        self._kept.clear()

    @property
    def nbytes(self) -> int:
        kept = (tensor for pair in self._kept.values() for tensor in pair)
        held = (self._k, self._v, self._dk, self._dv, *kept)
        return sum(t.numel() * t.element_size() for t in held if t is not None)
