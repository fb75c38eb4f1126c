"""Tensors of a layer of experts, forward and backward: tokens go to their experts, one after the other, and back.

Routing is taken to be even: every rank's experts get as many tokens as it has sent.
"""
from __future__ import annotations

from megatron_longstraw.planner.shape import Shape
from megatron_longstraw.planner.tape import COMMUNICATION, WEIGHT_GRADIENTS, Tape


class Experts:
    """Sizes for a micro-batch of `rows` rows of which a rank holds its part of the stream."""

    def __init__(self, shape: Shape, rows: int):
        model, self.shape = shape.model, shape
        own = rows / shape.stream_split
        # Without expert parallelism tensor parallelism cuts every expert, and its ranks gather their tokens.
        gathered, cut = (1, 1) if shape.ep > 1 else (shape.stream_split, shape.tp)
        element = shape.element_bytes
        self.router = own * model.num_experts * (2 * element + 2)
        self.sent = own * model.moe_router_topk * model.hidden_size * element
        self.tokens = self.sent * gathered
        self.width = model.moe_ffn_hidden_size // cut
        self.inner = own * model.moe_router_topk * gathered * self.width * element
        self.shared_width = (model.moe_shared_expert_intermediate_size or 0) // shape.tp
        self.shared = rows * self.shared_width * element
        self.output = own * model.hidden_size * element
        self.local = model.num_experts // shape.ep

    def forward(self, tape: Tape, grad: bool) -> None:
        if self.shared:
            self._inner(tape, "shared.", self.shared, weighted=False, grad=grad)
            tape.new("shared.output", self.output)
        tape.new("router", self.router)
        tape.new("permuted", self.sent)
        if self.shape.ep > 1 or self.tokens > self.sent:
            tape.new("received", self.tokens, COMMUNICATION)
        if self.local > 1:
            tape.new("sorted", self.tokens)
            tape.free("received")
        if grad:
            self._inner(tape, "experts.", self.inner, weighted=True, grad=True)
        else:  # an expert's tensors go before the next one's come
            self._inner(tape, "experts.", self.inner / self.local, weighted=True, grad=False)
        tape.new("expert outputs", self.tokens)
        if self.local > 1:
            tape.briefly("joined", self.tokens)
            tape.new("unsorted", self.tokens)
            tape.free("expert outputs")
        if self.shape.ep > 1:
            tape.briefly("returned", self.sent, COMMUNICATION)
        tape.new("combined", self.output)
        tape.free("expert outputs", "unsorted", "permuted", *(() if grad else ("sorted", "received", "router")))
        tape.new("down", self.output)
        tape.free("combined", "shared.output")

    @staticmethod
    def _inner(tape: Tape, name: str, size: float, weighted: bool, grad: bool) -> None:
        parts = {"up": 2 * size, "gate": size, "linear": size, "product": size}
        parts |= {"weighted": size} if weighted else {}
        for part, num_bytes in parts.items():
            tape.new(name + part, num_bytes)
        if not grad:
            tape.free(*(name + part for part in parts))

    def backward(self, tape: Tape) -> None:
        tape.new("d_tokens", self.tokens)
        if self.local > 1:
            tape.briefly("d_unsorted", self.tokens)
        expert = self.inner / self.local
        tape.new("d_expert", 4 * expert)
        self._weight(tape, 2 * self.width)
        tape.free("d_expert", *(f"experts.{part}" for part in ("up", "gate", "linear", "product", "weighted")))
        tape.new("d_sorted", self.tokens)
        tape.free("d_tokens", "sorted", "received")
        tape.new("d_permuted", self.tokens)
        tape.free("d_sorted")
        tape.new("d_norm", self.output)
        tape.free("d_permuted", "router")
        if self.shared:
            tape.new("d_shared", 3 * self.shared)
            self._weight(tape, 2 * self.shared_width)
            tape.free("d_shared", *(f"shared.{part}" for part in ("up", "gate", "linear", "product")))

    def _weight(self, tape: Tape, width: int) -> None:
        if self.shape.adapter_rank is None:
            size = width * self.shape.model.hidden_size * self.shape.element_bytes
            tape.briefly("d_weight", size, WEIGHT_GRADIENTS)
