"""Megatron's decoder layer, less the work whose result nobody reads."""
from __future__ import annotations

from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_longstraw.mcore.packed import BranchParams
from megatron_longstraw.prefix.microbatch import MicroBatch


class BranchLayer(TransformerLayer):
    """A TransformerLayer that knows which rows are a prompt's.

    Of a prompt chunk the model's last layer is asked for K, V alone: its attention, projection and MLP are left out,
    the same on all ranks that meet in them (`MicroBatch.head` is a fact of the whole call).
    """

    def forward(self, hidden_states: Tensor, *, packed_seq_params: BranchParams | None = None, **options):
        mb = packed_seq_params.micro_batch if packed_seq_params is not None else None
        if mb is not None and not mb.head and self.layer_number == self.config.num_layers:
            return self._keys_and_values(hidden_states, options["rotary_pos_emb"], mb), options["context"]
        return super().forward(hidden_states, packed_seq_params=packed_seq_params, **options)

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
