"""How a micro-batch's facts reach core attention: as Megatron's `packed_seq_params`.

GPTModel, block, layer and attention hand the object on untouched, and activation recompute closes over it, so
the recompute of a micro-batch sees that micro-batch's facts whatever ran in between.
"""
from __future__ import annotations

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams

from megatron_longstraw.prefix.decode import DecodeState
from megatron_longstraw.prefix.microbatch import MicroBatch


@dataclass
class BranchParams(PackedSeqParams):
    """`qkv_format` is 'sbhd', so Megatron treats the rows as an ordinary batch. Exactly one of the two is set."""

    qkv_format: str = "sbhd"
    micro_batch: MicroBatch | None = None
    decode: DecodeState | None = None
    rotary_offset: int = 0
    """Global position of this rank's first row."""
    rotary_rows: int = 0
    """Rows of this rank, before sequence parallelism splits them over tp."""
