"""The `core_attention` slot of Megatron's layer spec, filled with attention over a shared, sharded prefix."""
from __future__ import annotations

import math

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_longstraw.mcore.packed import BranchParams
from megatron_longstraw.prefix.attention import BranchAttention, SeedOnly
from megatron_longstraw.prefix.decode import decode_attention
from megatron_longstraw.prefix.microbatch import MicroBatch
from megatron_longstraw.prefix.state import TokenState


class BranchCoreAttention(MegatronModule):
    """Takes q [s, b, np, hn] and unexpanded k, v [s, b, ng, hn] with RoPE applied; returns [s, b, np * hn].

    Which tokens the rows see, and what is stored, is said by `packed_seq_params` (a `BranchParams`).
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
    ):
        super().__init__(config=config)
        self.layer_number = layer_number
        self.cp_group = pg_collection.cp
        scale = softmax_scale if softmax_scale is not None else config.softmax_scale
        self.scale = scale if scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: BranchParams | None = None,
    ) -> Tensor:
        if packed_seq_params.decode is not None:
            out = decode_attention(
                query, key, value, packed_seq_params.decode, self.layer_number, self.scale, self.cp_group
            )
        else:
            out = self._attend(query, key, value, packed_seq_params.micro_batch)
        return out.reshape(*out.shape[:2], -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mb: MicroBatch) -> Tensor:
        state = mb.store.layer(self.layer_number) if mb.store is not None else None
        known = self._known(mb, state)
        out, lse = BranchAttention.apply(query, key, value, mb, state, self.scale, self.cp_group, known)
        if mb.appends:
            _append(state, key, value, mb)
            # Under autograd the graph keeps it.
            if mb.store.keeps_attention_of(mb.chunk_index) and not torch.is_grad_enabled():
                state.keep_attention(mb.chunk_index, out.detach(), lse)
        elif mb.grad and mb.store is not None and known is None and not torch.is_grad_enabled():
            # The grad-off forward of activation recompute: the recompute on the same input takes it from here.
            mb.recomputed[self.layer_number] = (out, lse)
        return out

    def store_only(self, key: Tensor, value: Tensor, mb: MicroBatch, shape: torch.Size) -> Tensor:
        """Take k, v [s, b, ng, hn] of a prompt chunk whose attention nobody reads: zeros of `shape`, through which
        backward gives k and v what their readers sent to the store."""
        state = mb.store.layer(self.layer_number) if mb.store is not None else None
        if mb.appends:
            _append(state, key, value, mb)
        return SeedOnly.apply(key, value, mb, state, shape)

    def _known(self, mb: MicroBatch, state: TokenState | None) -> tuple[Tensor, Tensor] | None:
        """Attention of these very rows from an earlier forward, so that it never runs twice on one input."""
        if mb.seeded and (kept := state.kept_attention(mb.chunk_index)) is not None:
            return kept
        return mb.recomputed.pop(self.layer_number, None) if torch.is_grad_enabled() else None


def _append(state: TokenState, key: Tensor, value: Tensor, mb: MicroBatch) -> None:
    valid = mb.valid_local_tokens
    if valid:
        state.append(mb.visible_tokens, key[:valid].detach(), value[:valid].detach())
