"""The moments of a step that may hold most: what each call needs beyond weights, optimizer and captured state."""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from megatron_longstraw.planner.layer import Layer, Rows
from megatron_longstraw.planner.shape import FLOAT32, Shape
from megatron_longstraw.planner.tape import ACTIVATIONS, COMMUNICATION, LOGITS, PREFIX_GRADIENTS, WEIGHT_GRADIENTS, Tape

SAMPLING = "sampling"


@dataclass(frozen=True)
class Moment:
    """What is alive at one point of a step, in bytes by kind."""

    name: str
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def num_bytes(self) -> int:
        return int(sum(self.kinds.values()))


def moments(shape: Shape, stage: int, prefix_grad: int, sampling_kv: int) -> list[Moment]:
    """Of one optimizer step on a rank of this stage. The numbers are `RankBytes`'."""
    prefix, rollout = shape.config.prefix, shape.config.rollout
    if prefix.schedule == "full":
        length = shape.rows((rollout.max_prompt_length or 1) + rollout.max_response_length - 1)
        head_rows = min(length, rollout.max_response_length)
        work = _MicroBatch(shape, stage, Rows(length, 1, prefix=False), head_rows)
        return work.under_autograd("full")
    prompts, responses = shape.prompts_per_capture, min(prefix.branches_per_microbatch, rollout.group_size)
    chunk = Rows(shape.chunk_rows(), prompts, prefix=shape.num_chunks > 1, chunk=True)
    pack = Rows(shape.rows(rollout.max_response_length), prompts * responses, prefix=shape.num_chunks > 0)
    packs = -(-rollout.group_size // responses)
    capture, replay = _MicroBatch(shape, stage, chunk), _MicroBatch(shape, stage, pack, pack.total, packs)
    decoding = _MicroBatch(shape, stage, Rows(1, prompts * -(-rollout.group_size // shape.cp), prefix=pack.prefix))
    found = [
        Moment("capture", capture.without_autograd()),
        Moment("sampling", decoding.without_autograd() + Counter({SAMPLING: sampling_kv})),
        # dK, dV of a layer appear with its first backward.
        *replay.under_autograd("replay", prefix_grad, prefix_grad / shape.layers if packs == 1 else 0.0),
    ]
    if shape.num_chunks_walked_back:
        chunk = replace(chunk, known_attention=shape.out_tier != "none")
        walk = _MicroBatch(shape, stage, chunk, num_microbatches=shape.num_chunks_walked_back)
        found += walk.under_autograd("prefix_backward", prefix_grad)
    return found


class _MicroBatch:
    """One micro-batch on a stage. `head_rows`: rows whose log-probs are taken (0: the head is not run)."""

    def __init__(self, shape: Shape, stage: int, rows: Rows, head_rows: int = 0, num_microbatches: int = 1):
        self.shape, self.stage, self.rows = shape, stage, rows
        self.layer = Layer(shape, rows)
        self.last = stage == shape.pp - 1
        self.shortened = shape.shortened_layers(stage) if rows.chunk else 0
        self.whole = shape.layers - self.shortened
        self.head_rows = head_rows if self.last else 0
        self.others_in_flight = self._in_flight(num_microbatches) - 1
        self.recomputes = shape.config.parallel.recompute_granularity is not None
        self.keeps_attention = self.recomputes and shape.config.prefix.schedule != "full"
        """Of the forward that is recomputed, so that attention is not."""

    def without_autograd(self) -> Counter[str]:
        tape = Tape()
        tape.new("inputs", 2 * self.layer.stream)  # the stage's and the layer's
        (self.layer.forward if self.whole else self.layer.keys_and_values)(tape, grad=False)
        return tape.at_peak + self._buffers()

    def under_autograd(self, name: str, gradients: float = 0.0, appearing: float = 0.0) -> list[Moment]:
        """Where peaks are: in the head and in the top layer's backward all layers are kept, at the bottom of the stack
        all dK, dV have appeared. `gradients`: of dK, dV in the end; `appearing`: with each layer's backward, 0 where
        all are there from the start."""
        of_layer, top_layer = self._layer_under_autograd(appearing)
        kept, below_top = self._kept(of_layer)
        others = self.others_in_flight * (kept + self._top().alive_bytes)
        there = 0.0 if appearing else gradients
        base = Counter({ACTIVATIONS: self.layer.stream + others, PREFIX_GRADIENTS: there}) + self._buffers()
        all_kept = base + Counter({ACTIVATIONS: kept + self.layer.stream * self.recomputes})
        base += self._tied_head_gradient()
        found = [
            base + self._embedding_backward() + Counter({PREFIX_GRADIENTS: gradients - there}),
            all_kept + self._top().at_peak + self._head(),
        ]
        if self.whole:
            found += [
                base + top_layer + Counter({ACTIVATIONS: below_top}),
                base + top_layer + Counter({PREFIX_GRADIENTS: gradients - there - appearing}),
            ]
        if self.shortened:
            below = kept - self._shortened().alive_bytes * (not self.recomputes)
            backward = self._shortened(backward=True).at_peak
            found.append(base + backward + Counter({ACTIVATIONS: below}))
        if self.recomputes:
            found.append(all_kept + self.without_autograd())
        return [Moment(name, kinds) for kinds in found]

    def _layer_under_autograd(self, appearing: float) -> tuple[float, Counter[str]]:
        """(bytes that a layer keeps for its backward, what is alive when it has most)."""
        layer, tape = self.layer, Tape()
        if self.keeps_attention:
            layer = Layer(self.shape, replace(self.rows, known_attention=True))
        layer.forward(tape, grad=True)
        of_layer = tape.alive_bytes
        layer.backward(tape, appearing)
        return of_layer, tape.at_peak

    def _kept(self, of_layer: float) -> tuple[float, float]:
        """(what all layers of the stage keep until their backward, what is left of it below the top layer when that
        runs backward)."""
        layers, whole, parallel = self.shape.layers, self.whole, self.shape.config.parallel
        shortened = self._shortened().alive_bytes
        if not self.recomputes:
            return whole * of_layer + shortened, (whole - 1) * of_layer
        attention = 0.0
        if self.keeps_attention and not self.rows.known_attention:
            attention = whole * (self.layer.query + self.layer.lse)
        unit = min(parallel.recompute_num_layers, layers)
        if parallel.recompute_method == "block":
            kept = attention + unit * self.layer.stream
            if unit == layers:
                return kept, kept
            kept += (whole - unit) * of_layer
            return kept + shortened, kept - of_layer * (unit < whole)
        kept = attention + -(-layers // unit) * self.layer.stream
        return kept, kept + (min(unit, whole) - 1) * of_layer

    def _shortened(self, backward: bool = False) -> Tape:
        """What the layer that is asked for K, V alone keeps for its backward, or has had after it."""
        tape = Tape()
        if self.shortened:
            self.layer.keys_and_values(tape, grad=True)
            tape.free("output")
            if backward:
                self.layer.keys_and_values_backward(tape)
        return tape

    def _in_flight(self, num_microbatches: int) -> int:
        """Micro-batches whose forward has run before the first one's backward, of this stage's layers."""
        shape, depth = self.shape, self.shape.pp - self.stage
        vpp = shape.config.parallel.num_virtual_stages_per_pipeline_rank
        if vpp is not None and shape.pp > 1:
            depth = -(-(2 * (depth - 1) + (vpp - 1) * shape.pp + 1) // vpp)
        return max(1, min(depth, num_microbatches))

    def _top(self) -> Tape:
        """What the final norm keeps."""
        tape = Tape()
        if self.last:
            self.layer.norm(tape, "final", self.layer.stream, grad=True)
        return tape

    def _buffers(self) -> Counter[str]:
        """Megatron's own for the rows that sequence parallelism gathers; it is never freed."""
        return Counter({COMMUNICATION: self.layer.whole_stream}) if self.shape.sp else Counter()

    def _head(self) -> Counter[str]:
        """Log-probs of a chunk of rows, or their gradient: float32 logits up to three times, or twice beside the
        weight's gradient, or once as the gradient's next part appears."""
        if not self.head_rows:
            return Counter()
        shape, rows = self.shape, min(self.shape.config.prefix.log_probs_chunk_size, self.head_rows)
        logits = rows * shape.padded_vocab * FLOAT32
        weight = shape.padded_vocab * shape.model.hidden_size * (shape.adapter_rank is None)
        own = self.layer.whole_stream * (1 + shape.sp)
        # The last chunk's gradient of logits lives on while the next one's appears.
        last = logits / self.layer.widen * (self.head_rows > rows)
        stages = (
            Counter({LOGITS: 3 * logits}),
            Counter({LOGITS: 2 * logits + last, WEIGHT_GRADIENTS: weight * FLOAT32}),
            Counter({LOGITS: logits / self.layer.widen, WEIGHT_GRADIENTS: weight * (FLOAT32 + shape.element_bytes)}),
        )
        return max(stages, key=Counter.total) + Counter({ACTIVATIONS: own})

    def _tied_head_gradient(self) -> Counter[str]:
        """It waits for the embedding's, with which it is summed."""
        tied = not self.shape.model.untie_embeddings_and_output_weights and self.shape.pp == 1
        return self._embedding_gradient() if tied and self.head_rows else Counter()

    def _embedding_backward(self) -> Counter[str]:
        """A tied head's gradient is there already, and their sum appears beside both."""
        return self._embedding_gradient() + self._tied_head_gradient()

    def _embedding_gradient(self) -> Counter[str]:
        shape = self.shape
        if self.stage or shape.adapter_rank is not None:
            return Counter()
        return Counter({WEIGHT_GRADIENTS: shape.padded_vocab * shape.model.hidden_size * shape.element_bytes})
