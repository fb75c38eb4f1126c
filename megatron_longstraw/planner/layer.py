"""Tensors of one transformer layer in the order in which they appear and go.

Follows Megatron-Core's local layer spec with this package's attention, forward and backward. A layer's own input is
not counted (it is the output of the layer below, which counts it), and neither are weights or stored prefix state.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_longstraw.planner.experts import Experts
from megatron_longstraw.planner.shape import FLOAT32, Shape
from megatron_longstraw.planner.tape import ACTIVATIONS, COMMUNICATION, PREFIX_GRADIENTS, WEIGHT_GRADIENTS, Tape


@dataclass(frozen=True)
class Rows:
    """What one micro-batch brings to a rank."""

    length: int
    """Rows per sequence."""
    sequences: int
    known_attention: bool = False
    """(out, lse) of its rows are in the store already."""
    prefix: bool = True
    """It attends to stored tokens."""
    chunk: bool = False
    """They are a prompt's: they are stored, and nobody takes their log-probs."""

    @property
    def total(self) -> int:
        return self.length * self.sequences


class Layer:
    """Sizes of one layer's tensors for a micro-batch, and their life."""

    def __init__(self, shape: Shape, rows: Rows):
        self.shape, self.rows = shape, rows
        model, self.element, n = shape.model, shape.element_bytes, rows.total
        self.whole_stream = n * model.hidden_size * self.element
        self.stream = self.whole_stream / shape.stream_split
        self.query, self.key = n * shape.query_width * self.element, n * shape.key_width * self.element
        self.lse = n * shape.heads * FLOAT32
        self.phases = 4 * rows.length * model.kv_channels * model.rotary_percent * self.element
        self.ffn = n * (model.ffn_hidden_size // shape.tp) * self.element
        self.widen = FLOAT32 / self.element
        self.experts = None if model.num_experts is None else Experts(shape, n)
        self.rounds_own = rows.chunk and shape.rounds_kv
        self.mlp_block = self._mlp_block()

    def _mlp_block(self) -> Layer | None:
        """The rows of a chunk that go through the MLP at once; None: all."""
        at_once = self.shape.config.prefix.prefix_mlp_block_tokens
        if not self.rows.chunk or at_once is None:
            return None
        length = self.rows.length / self.shape.stream_split
        num_blocks = -(-length // at_once)
        if num_blocks <= 1:
            return None
        return Layer(self.shape, replace(self.rows, length=-(-self.rows.length // int(num_blocks)), chunk=False))

    # -- forward ---------------------------------------------------------------------------------------------

    def forward(self, tape: Tape, grad: bool) -> None:
        self.norm(tape, "norm1", self.stream, grad)
        self._attention(tape, grad)
        self._project(tape, "projected")
        if not grad:
            tape.free("qkv", "q", "k", "kv.rounded", "out", "lse", "phases")
        tape.new("middle", self.stream)
        tape.free("projected", *(() if grad else ("norm1",)))
        if self.mlp_block is None:
            self._mlp_part(tape, grad)
        else:
            tape.new("blocks", self.stream)
            self.mlp_block._mlp_part(tape, grad=False)
            tape.free("output")
            tape.new("output", self.stream)
            tape.free("blocks")
        tape.free(*(() if grad else ("middle",)))

    def _mlp_part(self, tape: Tape, grad: bool) -> None:
        self.norm(tape, "norm2", self.stream, grad)
        self._mlp(tape, grad)
        tape.new("output", self.stream)
        tape.free("down", *(() if grad else ("norm2",)))

    def keys_and_values(self, tape: Tape, grad: bool) -> None:
        """Instead of `forward`: all that a prompt chunk asks the model's last layer for."""
        self.norm(tape, "norm1", self.stream, grad)
        self._project_in(tape, grad)
        tape.new("phases", self.phases)
        tape.briefly("rotation", 3 * self.key)
        tape.new("k", self.key)
        tape.new("output", self.stream)
        tape.free("k", "q", "norm_q", "norm_q.wide", "norm_q.normed", "norm_k")
        if not grad:
            tape.free("norm1", "qkv", "phases")
        elif not self.shape.model.qk_layernorm:
            tape.free("qkv")

    def norm(self, tape: Tape, name: str, size: float, grad: bool) -> None:
        """Computed in float32; backward wants the input and the unweighted result in it."""
        wide = size * self.widen
        if self.element < FLOAT32:
            tape.new(f"{name}.wide", wide)
        tape.briefly("square", wide)
        tape.new(f"{name}.normed", wide)
        if self.element < FLOAT32:
            tape.new("weighted", wide)
        tape.new(name, size)
        tape.free("weighted", *(() if grad else (f"{name}.wide", f"{name}.normed")))

    def _project_in(self, tape: Tape, grad: bool) -> None:
        """Queries, keys and values before they are rotated."""
        model, kv = self.shape.model, self.key
        if model.add_qkv_bias:
            tape.new("unbiased", self.query + 2 * kv)
        tape.new("qkv", self.query + 2 * kv)
        tape.free("unbiased")
        tape.new("q", self.query)
        if model.qk_layernorm:
            self.norm(tape, "norm_q", self.query, grad)
            self.norm(tape, "norm_k", kv, grad)
            if not grad:
                tape.free("q")

    def _attention(self, tape: Tape, grad: bool) -> None:
        model, kv = self.shape.model, self.key
        self._project_in(tape, grad)
        tape.new("phases", self.phases)
        for name, size in (("q.rotated", self.query), ("k", kv)):
            tape.briefly("rotation", 3 * size)
            tape.new(name, size)
        tape.free("norm_q", "norm_k", *(() if model.qk_layernorm and grad else ("q",)))
        if self.rounds_own:
            tape.briefly("rounding", 2 * kv * self.widen)
            tape.new("kv.rounded", 2 * kv)
            tape.free("k", *(() if model.qk_layernorm and grad else ("qkv",)))
        if self.rows.known_attention and not (self.rows.chunk and self.shape.out_tier == "host"):
            return
        if not self.rows.known_attention:
            self._merge(tape)
        tape.new("out", self.query)
        tape.new("lse", self.lse)
        tape.free("merged", "merged.own")

    def _merge(self, tape: Tape) -> None:
        """Partial results over stored blocks and own rows, of the queries of all context-parallel ranks."""
        cp, wide = self.shape.cp, self.query * self.widen
        kind = COMMUNICATION if cp > 1 else ACTIVATIONS
        if cp > 1:
            tape.new("q.gathered", cp * self.query, COMMUNICATION)
        elif not self.rows.prefix:
            tape.briefly("partial", self.query)
            return
        tape.new("staged", self.shape.staged_kv_bytes * self.rows.prefix)
        tape.new("merged", cp * wide, kind)
        tape.new("partial", cp * self.query, kind)
        if self.element < FLOAT32:
            tape.briefly("partial.wide", cp * wide, kind)
        if cp > 1:
            tape.briefly("share", cp * wide, COMMUNICATION)
            tape.new("merged.own", wide, COMMUNICATION)
        tape.free("q.gathered", "partial", "staged")
        if self.element == FLOAT32:
            tape.free("merged", "merged.own")  # it is the output itself

    def _project(self, tape: Tape, name: str) -> None:
        """A linear layer whose input is split over tensor-parallel ranks, back to the stream."""
        if self.shape.sp:
            tape.new("unreduced", self.whole_stream)
        tape.new(name, self.stream)
        tape.free("unreduced")

    def _mlp(self, tape: Tape, grad: bool) -> None:
        if self.experts is not None:
            self.experts.forward(tape, grad)
            return
        tape.new("up", 2 * self.ffn)
        for name in ("gate", "linear", "product"):
            tape.new(name, self.ffn)
        if not grad:
            tape.free("up", "gate", "linear")
        self._project(tape, "down")
        if not grad:
            tape.free("product")

    # -- backward --------------------------------------------------------------------------------------------

    def backward(self, tape: Tape, prefix_gradients: float = 0.0) -> None:
        """After `forward` with grad on the same tape. `prefix_gradients`: of dK, dV that appear in it, to stay."""
        tape.new("d_output", self.stream)
        if self.mlp_block is None:
            self._mlp_part_backward(tape)
        else:  # each block runs again, and their gradients wait to be joined
            tape.new("d_blocks", self.stream)
            self.mlp_block._mlp_part(tape, grad=True)
            tape.free("output")
            self.mlp_block._mlp_part_backward(tape)
            tape.briefly("d_joined", self.stream)
            tape.free("d_blocks")
        self._attention_backward(tape, prefix_gradients)
        self._norm_backward(tape, "norm1", self.stream)

    def _mlp_part_backward(self, tape: Tape) -> None:
        self._mlp_backward(tape)
        self._norm_backward(tape, "norm2", self.stream)

    def keys_and_values_backward(self, tape: Tape) -> None:
        """After `keys_and_values` with grad on the same tape."""
        tape.new("d_output", self.stream)
        tape.new("d_k", self.key)
        tape.new("d_v", self.key)
        self._seed(tape)
        tape.briefly("d_rotation", 3 * self.key)
        if self.shape.model.qk_layernorm:
            self._norm_backward(tape, "norm_k", self.key)
        self._project_in_backward(tape)
        self._norm_backward(tape, "norm1", self.stream)

    def _linear_backward(self, tape: Tape, name: str, size: float, inner: float) -> None:
        """Gradients of input and weight; `inner`: the side that tensor parallelism splits."""
        tape.new(name, size)
        if self.shape.adapter_rank is None:
            tape.briefly("d_weight", inner * self.shape.model.hidden_size * self.element, WEIGHT_GRADIENTS)

    def _mlp_backward(self, tape: Tape) -> None:
        if self.experts is not None:
            self.experts.backward(tape)
            tape.free("norm2")
            return
        width = self.shape.model.ffn_hidden_size // self.shape.tp
        if self.shape.sp:
            tape.new("d_gathered", self.whole_stream, COMMUNICATION)
        self._linear_backward(tape, "d_product", self.ffn, width)
        tape.free("product", "d_gathered")
        tape.new("d_gate", self.ffn)
        tape.new("d_linear", self.ffn)
        tape.free("d_product", "gate", "linear")
        tape.new("d_silu", self.ffn)
        tape.free("d_gate", "up")
        tape.new("d_up", 2 * self.ffn)
        tape.free("d_silu", "d_linear")
        self._linear_backward(tape, "d_norm", self.whole_stream, 2 * width)
        tape.free("d_up", "norm2")

    def _norm_backward(self, tape: Tape, name: str, size: float) -> None:
        tape.briefly("d_norm.terms", 3 * size * self.widen)
        tape.free("d_norm", f"{name}.wide", f"{name}.normed")

    def _attention_backward(self, tape: Tape, prefix_gradients: float) -> None:
        model, kv = self.shape.model, self.key
        if self.shape.sp:
            tape.new("d_gathered", self.whole_stream, COMMUNICATION)
        self._linear_backward(tape, "d_out", self.query, self.shape.query_width)
        tape.free("d_gathered")
        self._core_backward(tape, prefix_gradients)
        tape.free("q.rotated", "k", "kv.rounded", "out", "lse", "d_out")
        tape.briefly("d_rotation", 3 * self.query)
        if model.qk_layernorm:
            self._norm_backward(tape, "norm_q", self.query)
            self._norm_backward(tape, "norm_k", kv)
        self._project_in_backward(tape)

    def _project_in_backward(self, tape: Tape) -> None:
        tape.new("d_qkv", self.query + 2 * self.key)
        tape.free("d_q", "d_k", "d_v", "phases", "q", "qkv")
        self._linear_backward(tape, "d_norm", self.whole_stream, self.shape.query_width + 2 * self.shape.key_width)
        tape.free("d_qkv", "norm1")

    def _core_backward(self, tape: Tape, prefix_gradients: float) -> None:
        """Sums in float32; the results of one block of stored tokens live on while the next one's appear."""
        cp, wide = self.shape.cp, self.widen
        kind = COMMUNICATION if cp > 1 else ACTIVATIONS
        if cp > 1:
            tape.briefly("stacked", 3 * self.query, COMMUNICATION)
            tape.new("gathered", cp * 3 * self.query + cp * self.lse, COMMUNICATION)
        tape.new("d_q.all", cp * self.query * wide, kind)
        if prefix_gradients:
            tape.new("prefix gradients", prefix_gradients, PREFIX_GRADIENTS)
        if self.rows.prefix:
            tape.new("staged", self.shape.staged_kv_bytes + self.shape.staged_grad_bytes)
            block = cp * self.query + self.shape.block_bytes
            tape.briefly("blocks", self.shape.blocks_in_use * block, kind)
            tape.free("staged")
            tape.new("block", block, kind)
        tape.new("d_kv.own", 2 * self.key * wide)
        tape.briefly("own", cp * self.query + 2 * self.key, kind)
        tape.free("block")
        self._seed(tape)
        if cp > 1:
            tape.new("d_q.wide", self.query * wide)
            tape.free("d_q.all", "gathered")
        tape.new("d_q", self.query)
        tape.new("d_k", self.key)
        tape.new("d_v", self.key)
        tape.free("d_q.all", "d_q.wide", "d_kv.own")

    def _seed(self, tape: Tape) -> None:
        """Copies of what readers sent to a chunk's rows: from the host, and widened."""
        copies = self.shape.kv_grad_bytes * (self.shape.kv_tier == "host")
        copies += FLOAT32 * (self.shape.kv_grad_bytes < FLOAT32)
        if self.rows.chunk and copies:
            tape.briefly("seed", 2 * self.key * copies / self.element)
