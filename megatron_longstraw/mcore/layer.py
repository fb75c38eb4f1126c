"""Megatron's decoder layer, less the work whose result nobody reads."""
from __future__ import annotations

from functools import partial

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn.functional import pad

from megatron_longstraw.mcore.packed import BranchParams
from megatron_longstraw.prefix.microbatch import MicroBatch


class BranchLayer(TransformerLayer):
    """A TransformerLayer that knows which rows are a prompt's.

    Of a prompt chunk the model's last layer is asked for K, V alone: its attention, projection and MLP are left out,
    the same on all ranks that meet in them (`MicroBatch.head` is a fact of the whole call).

    Args:
        mlp_block_rows: rows of a chunk that go through the MLP and its norm at once, so that nothing as wide as the MLP
            is as long as the chunk; backward runs each block again. None: all.
        least_mlp_blocks: into how many blocks shorter micro-batches are cut too, where ranks meet in the MLP.
    """

    def __init__(self, *args, mlp_block_rows: int | None = None, least_mlp_blocks: int = 1, **options):
        super().__init__(*args, **options)
        self.mlp_block_rows, self.least_mlp_blocks = mlp_block_rows, least_mlp_blocks

    def forward(self, hidden_states: Tensor, *, packed_seq_params: BranchParams | None = None, **options):
        mb = packed_seq_params.micro_batch if packed_seq_params is not None else None
        if mb is None or mb.head:
            return super().forward(hidden_states, packed_seq_params=packed_seq_params, **options)
        if self.layer_number == self.config.num_layers:
            return self._keys_and_values(hidden_states, options["rotary_pos_emb"], mb), options["context"]
        hidden_states, context = self._forward_attention(hidden_states, packed_seq_params=packed_seq_params, **options)
        return self._mlp_in_blocks(hidden_states), context

    def _mlp_in_blocks(self, hidden_states: Tensor) -> Tensor:
        mlp, num_rows = self._forward_mlp, len(hidden_states)
        if self.mlp_block_rows is not None and torch.is_grad_enabled():
            mlp = partial(tensor_parallel.checkpoint, self._forward_mlp, False)
        num_blocks = max(-(-num_rows // (self.mlp_block_rows or num_rows)), self.least_mlp_blocks)
        if num_blocks == 1:
            return mlp(hidden_states)
        if num_rows < num_blocks:  # experts take no empty block
            hidden_states = pad(hidden_states, (0, 0, 0, 0, 0, num_blocks - num_rows))
        return torch.cat([mlp(block) for block in hidden_states.tensor_split(num_blocks)])[:num_rows]

    def _keys_and_values(self, hidden_states: Tensor, rotary_pos_emb: Tensor, mb: MicroBatch) -> Tensor:
        """Zeros like the hidden states [s, b, h], whose backward starts from what was sent to these rows' K, V."""
        attention = self.self_attention
        _, key, value = attention.get_query_key_value_tensors(self.input_layernorm(hidden_states))
        key = apply_rotary_pos_emb(
            key,
            rotary_pos_emb,
            config=self.config,
            mscale=_yarn_get_concentration_factor_from_config(self.config),
            cp_group=attention.pg_collection.cp,
        )
        return attention.core_attention.store_only(key, value, mb, hidden_states.shape)
