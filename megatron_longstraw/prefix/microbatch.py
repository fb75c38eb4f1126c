"""The facts of one micro-batch, as attention needs them.

They travel WITH the micro-batch (never in a global): under 1F1B another micro-batch's forward runs between a
forward and its backward, and activation recompute must see the facts of the micro-batch it recomputes.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from megatron_longstraw.context_parallel.layout import SequenceSlice
from megatron_longstraw.prefix.store import PrefixStore


@dataclass
class MicroBatch:
    """A chunk of prompts, or a pack of branches, or full sequences: rows of equal start on the batch dim.

    Four independent facts say what the call does with it: `appends`, `grad`, `seeded`, `head`.
    """

    rows: SequenceSlice
    """Positions of the rows and their cut over cp; num_tokens is the longest row of the batch."""
    num_prompts: int = 1
    """Batch rows come prompt-major: row i belongs to prompt i // (batch / num_prompts)."""
    store: PrefixStore | None = None
    """Prefix the rows attend to (None: they are whole sequences)."""
    visible_tokens: int = 0
    """Local tokens of the store that precede these rows: what this rank shows them."""
    chunk_index: int | None = None
    """Which chunk of the plan this is (None: not a chunk of the prefix)."""
    appends: bool = False
    """Capture: the rows' K, V enter the store."""
    grad: bool = False
    """Autograd is on; dK, dV of the prefix are added to the store."""
    seeded: bool = False
    """Prefix backward: the rows' own K, V receive what their readers sent to the store."""
    head: bool = False
    """What the last layer makes of the rows is wanted, for their log-probabilities; False: only the K, V of every layer
    are. The same for all micro-batches of a call, dummies included: ranks meet in the last layer or leave it out."""
    recomputed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """(out, lse) per layer from the grad-off forward of activation recompute, popped by the recompute."""

    @property
    def valid_local_tokens(self) -> int:
        return self.rows.valid_local_tokens
