"""One decoding step of many branches against a shared, sharded prefix.

All branches step in lockstep, so their new tokens share one position. Context parallelism gives each rank whole
branches (their short K, V stay where they are); only the prefix is sharded by tokens, so the new queries are
gathered, meet every rank's part of the prefix in one rectangle, and are merged back to their owner.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_longstraw.attention.kernels import attend
from megatron_longstraw.attention.merge import AttentionAccumulator
from megatron_longstraw.context_parallel.collectives import all_gather_rows, merge_over_ranks
from megatron_longstraw.prefix.attention import prefix_attention
from megatron_longstraw.prefix.store import PrefixStore


@dataclass
class DecodeState:
    """This rank's branches while they grow: own K, V per layer [b, K, max_tokens, D], and the step's facts."""

    store: PrefixStore
    num_prompts: int
    max_tokens: int
    position: int
    """Global position of the tokens of the current step."""
    length: int = 0
    """Tokens already in the caches, the current step's not included."""
    caches: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def extend(self, layer_number: int, k_1bKD: Tensor, v_1bKD: Tensor) -> tuple[Tensor, Tensor]:
        """Add this step's K, V and return all of the branches' own [b, K, length + 1, D]."""
        _, batch, heads, dim = k_1bKD.shape
        if layer_number not in self.caches:
            self.caches[layer_number] = tuple(x.new_empty((batch, heads, self.max_tokens, dim)) for x in (k_1bKD, v_1bKD))
        k, v = self.caches[layer_number]
        k[:, :, self.length] = k_1bKD[0]
        v[:, :, self.length] = v_1bKD[0]
        return k[:, :, : self.length + 1], v[:, :, : self.length + 1]

    def advance(self) -> None:
        self.length += 1
        self.position += 1


def decode_attention(q: Tensor, k: Tensor, v: Tensor, decode: DecodeState, layer_number: int, scale: float, cp_group) -> Tensor:
    """Attention of this step's tokens. q [s, b, N, D], k, v [s, b, K, D] with only row 0 valid (rows 1.. pad to
    the tensor-parallel size under sequence parallelism). Returns out [s, b, N, D], zero on pads."""
    q_step = q[:1]
    q_all = all_gather_rows(q_step, cp_group)  # [cp, b, N, D]: row r holds rank r's branches
    acc = AttentionAccumulator(q_all)
    store = decode.store
    state = store.layer(layer_number) if store.local_tokens else None
    prefix_attention(q_all, state, store.local_tokens, decode.num_prompts, scale, acc)
    out = torch.zeros_like(q)
    own = AttentionAccumulator(q_step)
    k_own, v_own = decode.extend(layer_number, k[:1], v[:1])
    own_out, own_lse = attend(q_step.permute(1, 2, 0, 3), k_own, v_own, causal=False, scale=scale)
    own.add(slice(0, 1), own_out.permute(2, 0, 1, 3), own_lse.permute(2, 0, 1))
    if store.plan.num_chunks:
        own.add(slice(0, 1), *merge_over_ranks(acc.out_SBND, acc.lse_SBN, cp_group))
    out[:1] = own.out_SBND
    return out
