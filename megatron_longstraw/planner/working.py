"""The moments of a step that may hold most: what each call needs beyond weights, optimizer and captured state."""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from megatron_longstraw.planner.shape import FLOAT32, Shape
from megatron_longstraw.planner.tape import ACTIVATIONS, COMMUNICATION, LOGITS, WEIGHT_GRADIENTS, Layer, Rows, Tape

PREFIX_GRADIENTS, SAMPLING = "dK, dV", "sampling"


@dataclass(frozen=True)
class Moment:
    """What is alive at one point of a step, in bytes by kind."""

    name: str
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def num_bytes(self) -> int:
        return int(sum(self.kinds.values()))


def moments(shape: Shape, stage: int, prefix_grad: int, sampling_kv: int) -> list[Moment]:
    """Of one optimizer step on a rank of this stage."""
    prefix, rollout = shape.config.prefix, shape.config.rollout
    responses = min(prefix.branches_per_microbatch, rollout.group_size)
    if prefix.schedule == "full":
        length = shape.rows((rollout.max_prompt_length or 1) + rollout.max_response_length)
        work = _MicroBatch(shape, stage, Rows(length, 1, prefix=False), head_rows=rollout.max_response_length)
        return [Moment("sampling", Counter({SAMPLING: sampling_kv})), *work.under_autograd("full", 0, 0)]
    prompts = shape.prompts_per_capture
    chunk = Rows(shape.chunk_rows(), prompts, prefix=shape.num_chunks > 1)
    found = [Moment("sampling", Counter({SAMPLING: sampling_kv}) + _MicroBatch(shape, stage, chunk).without_autograd())]
    pack = Rows(shape.rows(rollout.max_response_length), prompts * responses, prefix=shape.num_chunks > 0)
    packs = -(-rollout.group_size // responses)
    head_rows = pack.total * shape.cp if False else pack.total
    replay = _MicroBatch(shape, stage, pack, head_rows=head_rows, num_microbatches=packs)
    # dK, dV of a layer appear with its first backward.
    found += replay.under_autograd("replay", prefix_grad / shape.layers if packs == 1 else prefix_grad, prefix_grad)
    if shape.num_chunks_walked_back:
        known = Rows(chunk.length, prompts, known_attention=shape.out_tier != "none", prefix=chunk.prefix)
        walk = _MicroBatch(shape, stage, known, num_microbatches=shape.num_chunks_walked_back)
        found += walk.under_autograd("prefix_backward", prefix_grad, prefix_grad)
    return found


class _MicroBatch:
    """One micro-batch on a stage. `head_rows`: rows whose log-probs are taken (0: the head is not run)."""

    def __init__(self, shape: Shape, stage: int, rows: Rows, head_rows: int = 0, num_microbatches: int = 1):
        self.shape, self.stage, self.rows = shape, stage, rows
        self.layer = Layer(shape, rows)
        self.last = stage == shape.pp - 1
        self.head_rows = head_rows if self.last else 0
        self.others_in_flight = self._in_flight(num_microbatches) - 1

    def without_autograd(self) -> Counter[str]:
        tape = Tape()
        tape.new("input", 2 * self.layer.stream)  # the stage's, and the layer's
        self.layer.forward(tape, grad=False)
        return tape.at_peak + self._buffers()

    def under_autograd(self, name: str, first_gradients: float, gradients: float) -> list[Moment]:
        """The heads of the two lists that peaks come from: at the top of the stack everything below is kept, at its
        bottom all dK, dV have appeared."""
        tape = Tape()
        self.layer.forward(tape, grad=True)
        of_layer, forward_peak = tape.alive_bytes, tape.at_peak
        self.layer.backward(tape)
        backward_peak = tape.at_peak
        layers, unit, kept_input = self.shape.layers, 1, of_layer
        parallel = self.shape.config.parallel
        if parallel.recompute_granularity is not None:
            unit = min(parallel.recompute_num_layers, layers)
            kept_input = self.layer.stream / unit
            if not self.rows.known_attention and self.shape.config.prefix.schedule != "full":
                kept_input += self.layer.query + self.layer.lse
        kept = layers * kept_input
        base = Counter({ACTIVATIONS: self.layer.stream + self.others_in_flight * (kept + self._top().alive_bytes)})
        base += self._buffers()
        held_head = self._tied_head_gradient()
        below = Counter({ACTIVATIONS: max(0.0, (layers - unit) * kept_input) + (unit - 1) * of_layer})
        if unit == 1 and parallel.recompute_granularity is not None:
            below = Counter({ACTIVATIONS: layers * kept_input})
        top = Counter({ACTIVATIONS: self._top().alive_bytes + self.layer.stream})
        found = [
            base + below + backward_peak + held_head + Counter({PREFIX_GRADIENTS: first_gradients}),
            base + backward_peak + held_head + Counter({PREFIX_GRADIENTS: gradients}),
            base + self._embedding_backward() + held_head + Counter({PREFIX_GRADIENTS: gradients}),
        ]
        if self.head_rows:
            of_head = self._head()
            kept_all = Counter({ACTIVATIONS: kept})
            found.append(base + kept_all + top + of_head + Counter({PREFIX_GRADIENTS: 0.0}))
        del forward_peak
        return [Moment(name, kinds) for kinds in found]

    def _in_flight(self, num_microbatches: int) -> int:
        """Micro-batches whose forward has run before the first one's backward, of this stage's layers."""
        shape = self.shape
        vpp = shape.config.parallel.num_virtual_stages_per_pipeline_rank
        depth = shape.pp - self.stage
        if vpp is not None and shape.pp > 1:
            depth = -(-((shape.pp - self.stage - 1) * 2 + (vpp - 1) * shape.pp + 1) // vpp)
        return max(1, min(depth, num_microbatches))

    def _top(self) -> Tape:
        """What the final norm keeps."""
        tape = Tape()
        if self.last:
            self.layer._norm(tape, "final", self.layer.stream, True)
        return tape

    def _buffers(self) -> Counter[str]:
        """Megatron's own for the rows that sequence parallelism gathers; they are never freed."""
        return Counter({COMMUNICATION: self.layer.whole_stream}) if self.shape.sp else Counter()

    def _head(self) -> Counter[str]:
        """Log-probs of a chunk of rows and their gradient: float32 logits twice, or once with the weight's gradient."""
        shape, rows = self.shape, min(self.shape.config.prefix.log_probs_chunk_size, self.head_rows)
        logits = rows * shape.padded_vocab * FLOAT32
        weight = shape.padded_vocab * shape.model.hidden_size
        if shape.adapter_rank is not None:
            return Counter({LOGITS: 3 * logits})
        while_summing = Counter({LOGITS: logits * shape.element_bytes / FLOAT32})
        while_summing[WEIGHT_GRADIENTS] = weight * (FLOAT32 + shape.element_bytes)
        of_logits = Counter({LOGITS: 2 * logits, WEIGHT_GRADIENTS: weight * FLOAT32})
        in_forward = Counter({LOGITS: 3 * logits})
        return max(while_summing, of_logits, in_forward, key=lambda kinds: sum(kinds.values()))

    def _tied_head_gradient(self) -> Counter[str]:
        """It waits for the embedding's, with which it is summed."""
        shape = self.shape
        tied = not shape.model.untie_embeddings_and_output_weights and shape.pp == 1
        if not (tied and self.head_rows) or shape.adapter_rank is not None:
            return Counter()
        return Counter({WEIGHT_GRADIENTS: shape.padded_vocab * shape.model.hidden_size * shape.element_bytes})

    def _embedding_backward(self) -> Counter[str]:
        shape = self.shape
        if self.stage or shape.adapter_rank is not None:
            return Counter()
        return Counter({WEIGHT_GRADIENTS: shape.padded_vocab * shape.model.hidden_size * shape.element_bytes})
