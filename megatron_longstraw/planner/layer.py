"""Tensors of one transformer layer in the order in which they appear and go.

Follows Megatron-Core's local layer spec with this package's attention, forward and backward. A layer's own input is
not counted (it is the output of the layer below, which counts it), and neither are weights or stored prefix state.
"""
from __future__ import annotations

from dataclasses import dataclass

from megatron_longstraw.planner.experts import Experts
from megatron_longstraw.planner.shape import FLOAT32, Shape
from megatron_longstraw.planner.tape import ACTIVATIONS, COMMUNICATION, WEIGHT_GRADIENTS, Tape


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

    # -- forward ---------------------------------------------------------------------------------------------

    def forward(self, tape: Tape, grad: bool) -> None:
        self.norm(tape, "norm1", self.stream, grad)
        self._attention(tape, grad)
        self._project(tape, "projected")
        if not grad:
            tape.free("qkv", "q", "k", "out", "lse", "phases")
        tape.new("middle", self.stream)
        tape.free("projected", *(() if grad else ("norm1",)))
        self.norm(tape, "norm2", self.stream, grad)
        self._mlp(tape, grad)
        tape.new("output", self.stream)
        tape.free("down", *(() if grad else ("norm2", "middle")))

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

    def _attention(self, tape: Tape, grad: bool) -> None:
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
        tape.new("phases", self.phases)
        for name, size in (("q.rotated", self.query), ("k", kv)):
            tape.briefly("rotation", 3 * size)
            tape.new(name, size)
        tape.free("norm_q", "norm_k", *(() if model.qk_layernorm and grad else ("q",)))
        if self.rows.known_attention:
            return
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
        tape.new("merged", cp * wide, kind)
        tape.new("partial", cp * self.query, kind)
        if self.element < FLOAT32:
            tape.briefly("partial.wide", cp * wide, kind)
        if cp > 1:
            tape.briefly("share", cp * wide, COMMUNICATION)
            tape.new("merged.own", wide, COMMUNICATION)
        tape.free("q.gathered", "partial")
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

    def backward(self, tape: Tape) -> None:
        """After `forward` with grad on the same tape."""
        tape.new("d_output", self.stream)
        self._mlp_backward(tape)
        self._norm_backward(tape, "norm2", self.stream)
        self._attention_backward(tape)
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

    def _attention_backward(self, tape: Tape) -> None:
        model, kv = self.shape.model, self.key
        if self.shape.sp:
            tape.new("d_gathered", self.whole_stream, COMMUNICATION)
        self._linear_backward(tape, "d_out", self.query, self.shape.query_width)
        tape.free("d_gathered")
        self._core_backward(tape)
        tape.free("q.rotated", "k", "out", "lse", "d_out")
        tape.briefly("d_rotation", 3 * self.query)
        if model.qk_layernorm:
            self._norm_backward(tape, "norm_q", self.query)
            self._norm_backward(tape, "norm_k", kv)
        tape.new("d_qkv", self.query + 2 * kv)
        tape.free("d_q", "d_k", "d_v", "phases", "q", "qkv")
        self._linear_backward(tape, "d_norm", self.whole_stream, self.shape.query_width + 2 * self.shape.key_width)
        tape.free("d_qkv", "norm1")

    def _core_backward(self, tape: Tape) -> None:
        """Sums in float32; the results of one block of stored tokens live on while the next one's appear."""
        cp, wide = self.shape.cp, self.widen
        kind = COMMUNICATION if cp > 1 else ACTIVATIONS
        if cp > 1:
            tape.briefly("stacked", 3 * self.query, COMMUNICATION)
            tape.new("gathered", cp * 3 * self.query + cp * self.lse, COMMUNICATION)
        tape.new("d_q.all", cp * self.query * wide, kind)
        block = self.shape.block_bytes if self.rows.prefix else 0
        tape.new("block", 2 * (cp * self.query + block), kind)
        tape.free("block")
        tape.new("d_kv.own", 2 * self.key * wide)
        tape.briefly("own", cp * self.query + 2 * self.key, kind)
        if cp > 1:
            tape.new("d_q.wide", self.query * wide)
            tape.free("d_q.all", "gathered")
        tape.new("d_q", self.query)
        tape.new("d_k", self.key)
        tape.new("d_v", self.key)
        tape.free("d_q.all", "d_q.wide", "d_kv.own")
