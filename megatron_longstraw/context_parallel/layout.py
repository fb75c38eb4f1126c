"""Who holds which positions: contiguous slices of every chunk and every branch over the cp ranks.

Contiguous slices keep one RoPE offset per rank and make the stored prefix the concatenation of a rank's
slices. Pads stand at the end of a slice set only: they are causally invisible to every real token, carry
weight 0 and are never stored.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SequenceSlice:
    """One contiguous run of tokens, cut over the context-parallel ranks."""

    start: int
    """Global position of the first token of the run."""
    num_tokens: int
    """Valid tokens of the whole run."""
    local_tokens: int
    """Rows per rank, pads included; equal on all ranks."""
    cp_rank: int
    cp_size: int

    @property
    def local_start(self) -> int:
        """Global position of this rank's first row."""
        return self.start + self.cp_rank * self.local_tokens

    @property
    def valid_local_tokens(self) -> int:
        """Rows of this rank that are not pads (they come first)."""
        return min(max(self.num_tokens - self.cp_rank * self.local_tokens, 0), self.local_tokens)


def slice_sequence(start: int, num_tokens: int, *, cp_rank: int, cp_size: int, multiple: int = 1) -> SequenceSlice:
    """Cut `num_tokens` from `start` on over the cp ranks.

    `multiple`: each rank's rows are a multiple of it (the tensor-parallel size under sequence parallelism).
    """
    unit = cp_size * multiple
    padded = -(-num_tokens // unit) * unit
    return SequenceSlice(start, num_tokens, padded // cp_size, cp_rank, cp_size)


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of a prefix; capture and prefix backward must walk the very same ones."""

    chunks: tuple[SequenceSlice, ...]

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)

    def local_offset(self, chunk_index: int) -> int:
        """Where chunk `chunk_index` begins in this rank's store; with num_chunks: the local capacity."""
        return sum(chunk.valid_local_tokens for chunk in self.chunks[:chunk_index])


def plan_chunks(num_tokens: int, chunk_tokens: int, *, cp_rank: int, cp_size: int, multiple: int = 1) -> ChunkPlan:
    """Cut a prefix of `num_tokens` (may be 0: no chunk) into chunks of `chunk_tokens`, the last one shorter."""
    starts = range(0, num_tokens, chunk_tokens)
    return ChunkPlan(
        tuple(
            slice_sequence(
                start, min(chunk_tokens, num_tokens - start), cp_rank=cp_rank, cp_size=cp_size, multiple=multiple
            )
            for start in starts
        )
    )
