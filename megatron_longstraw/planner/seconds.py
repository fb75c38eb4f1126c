"""Seconds of a step, by call and by what they go into. Predictions from rates, see hardware.py."""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron_longstraw.planner.bytes import bytes_of_shape, layers_on_device
from megatron_longstraw.planner.hardware import ADAM_BYTES, ATTENTION_BACKWARD, GPUS_PER_NODE, Curve, Hardware
from megatron_longstraw.planner.layer import Layer, Rows
from megatron_longstraw.planner.parameters import adapter_parameters_of_rank, parameters_of_rank, products_of_layer
from megatron_longstraw.planner.shape import FLOAT32, Shape
from megatron_longstraw.planner.tape import Tape

CALLS = ("capture", "rollout", "score", "replay", "prefix_backward", "full", "optimizer")
LINKS = ("cp", "tp", "ep", "pp", "dp")
"""Kinds of communication."""
KINDS = ("matmul", "attention", "elementwise", "communication", "host", "idle")
"""idle: pipeline stages that wait, and operators that are started more slowly than they run."""
TOUCHED = 3
"""Times that a tensor's bytes pass by: written once, read twice."""


def step_seconds(shape: Shape, hardware: Hardware) -> dict[str, Counter[str]]:
    """Seconds of one step by call and kind; calls that a step does not make are left out."""
    return {call: _with_one_communication(hardware.corrected(call, cost)) for call, cost in by_link(shape, hardware).items()}


def by_link(shape: Shape, hardware: Hardware) -> dict[str, Counter[str]]:
    """The same by rates alone, without what measured calls add to them, and communication by LINKS."""
    calls = _Calls(shape, hardware)
    found = {name: getattr(calls, name)() for name in CALLS}
    return {name: cost for name, cost in found.items() if cost.total()}


def _with_one_communication(cost: Counter[str]) -> Counter[str]:
    links = sum(cost[link] for link in LINKS)
    return Counter({"communication": links} | {kind: value for kind, value in cost.items() if kind not in LINKS})


@dataclass(frozen=True)
class _Pass:
    """One micro-batch through a stage, `times` over."""

    rows: Rows
    keys: float
    """Stored tokens that each of its rows sees, on all context-parallel ranks together."""
    times: float
    forwards: int = 1
    """0 or 1, and one more under activation recompute."""
    attention_forwards: int = 1
    backward: bool = False
    head: bool = False
    prompt: bool = False


class _Calls:
    def __init__(self, shape: Shape, hardware: Hardware):
        self.shape, self.hardware = shape, hardware
        prefix, rollout, algorithm = shape.config.prefix, shape.config.rollout, shape.config.algorithm
        self.whole = prefix.schedule == "full"
        self.batches = -(-algorithm.train_batch_size // (shape.dp * prefix.prompts_per_microbatch))
        minibatches = algorithm.train_batch_size // algorithm.ppo_mini_batch_size
        self.updates = algorithm.ppo_epochs * minibatches
        self.update_batches = algorithm.ppo_epochs * self.batches
        self.prompts = min(prefix.prompts_per_microbatch, -(-algorithm.train_batch_size // shape.dp))
        self.recomputed = shape.config.parallel.recompute_granularity is not None
        responses = min(prefix.branches_per_microbatch, rollout.group_size)
        self.pack = Rows(shape.rows(rollout.max_response_length), self.prompts * responses)
        self.packs = -(-rollout.group_size // responses)
        self.chunk = Rows(shape.chunk_rows(), self.prompts, chunk=True)

    # -- calls -----------------------------------------------------------------------------------------------

    def capture(self) -> Counter[str]:
        shape = self.shape
        if not shape.prefix_tokens:
            return Counter()
        samples = self.batches + (self.update_batches - min(self.update_batches, self._kept()))
        chunk = _Pass(self.chunk, shape.prefix_tokens / 2, shape.num_chunks, prompt=True)
        return self._scaled(self._run(chunk), samples if not self.whole else self.batches)

    def rollout(self) -> Counter[str]:
        """One token of every response at a time; it passes all stages before the next one starts."""
        shape, rollout = self.shape, self.shape.config.rollout
        rows = self.prompts * -(-rollout.group_size // shape.cp)
        keys = (rollout.max_prompt_length or 1) + rollout.max_response_length / 2
        cost = self._one(_Pass(Rows(1, rows), keys, 1, head=True))
        cost["idle"] = self._waiting(cost, shape.layers * self.hardware.layer_token_s + self.hardware.token_s)
        return self._scaled(cost, rollout.max_response_length * self.batches * shape.pp)

    def score(self) -> Counter[str]:
        if self.updates == 1:
            return Counter()
        return self._scaled(self._branches(backward=False), self.batches + self.update_batches)

    def replay(self) -> Counter[str]:
        return Counter() if self.whole else self._scaled(self._branches(backward=True), self.update_batches)

    def prefix_backward(self) -> Counter[str]:
        shape = self.shape
        if not shape.num_chunks_walked_back:
            return Counter()
        keys = shape.prefix_tokens - shape.tokens_walked_back / 2
        chunk = _Pass(
            self.chunk, keys, shape.num_chunks_walked_back, forwards=1 + self.recomputed,
            attention_forwards=int(shape.out_tier == "none"), backward=True, prompt=True,
        )  # fmt: skip
        return self._scaled(self._run(chunk), self.update_batches)

    def full(self) -> Counter[str]:
        if not self.whole:
            return Counter()
        rollout = self.shape.config.rollout
        tokens = (rollout.max_prompt_length or 1) + rollout.max_response_length
        sequence = _Pass(
            Rows(self.shape.rows(tokens), 1, prefix=False), tokens / 2, rollout.group_size * self.prompts,
            forwards=1 + self.recomputed, attention_forwards=1 + self.recomputed, backward=True,
        )  # fmt: skip
        return self._scaled(self._run(sequence), self.update_batches)

    def optimizer(self) -> Counter[str]:
        """Gradients are summed over ranks; their norm is taken and they are scaled; Adam."""
        shape, hardware, cost = self.shape, self.hardware, Counter()
        trained = adapter_parameters_of_rank(shape) or parameters_of_rank(shape, 0).total
        ranks = shape.dp * shape.cp
        cost["dp"] = self._curve(shape.tp * ranks).seconds(2 * trained * FLOAT32 * (ranks - 1) / ranks)
        own = trained / (ranks if shape.config.parallel.use_distributed_optimizer else 1)
        cost["elementwise"] = hardware.memory.seconds(own * 3 * FLOAT32)
        if shape.optimizer_cpu_offload:
            copied = hardware.host.seconds(own * (FLOAT32 + shape.element_bytes))
            cost["host"] = copied + hardware.host_memory.seconds(own * ADAM_BYTES)
        else:
            cost["elementwise"] += hardware.adam.seconds(own)
        return self._scaled(cost, self.updates)

    # -- parts -----------------------------------------------------------------------------------------------

    def _kept(self) -> int:
        return bytes_of_shape(self.shape).captures

    def _branches(self, backward: bool) -> Counter[str]:
        shape = self.shape
        keys = shape.prefix_tokens + shape.config.rollout.max_response_length / 2
        again = self.recomputed and backward
        pack = _Pass(self.pack, keys, self.packs, forwards=1 + again, backward=backward, head=True)
        return self._run(pack)

    def _run(self, work: _Pass) -> Counter[str]:
        """A call of equal micro-batches through the pipeline."""
        cost = self._scaled(self._one(work), work.times)
        vpp = self.shape.config.parallel.num_virtual_stages_per_pipeline_rank or 1
        cost["idle"] += cost.total() * (self.shape.pp - 1) / (vpp * max(1, work.times))
        return cost

    def _one(self, work: _Pass) -> Counter[str]:
        """One micro-batch on one stage; in a pipeline on one of those that set the pace, without the last layer."""
        layer, shape = Layer(self.shape, work.rows), self.shape
        shortened = shape.shortened_layers(0) * work.prompt
        whole, attending = shape.layers - shortened, max(0, shape.attention_layers - shortened)
        cost = Counter(matmul=self._matmul(work) * whole + self._head(work))
        cost["matmul"] += self._matmul(work, keys_and_values=True) * shortened
        cost["attention"] = self._attention(work) * attending
        cost["elementwise"] = self._elementwise(work, layer) * whole
        cost["elementwise"] += self._elementwise(work, layer, keys_and_values=True) * shortened
        cost.update(self._scaled(self._layer_communication(work), whole))
        if shape.pp > 1:
            cost["pp"] = self._curve(shape.world_size).seconds(layer.stream) * (1 + work.backward)
        cost["host"] = max(0.0, self._host(work, attending) - cost["attention"])
        of_layer = work.forwards * self.hardware.layer_forward_s + work.backward * self.hardware.layer_backward_s
        cost["idle"] = self._waiting(cost, shape.layers * of_layer + self.hardware.micro_batch_s)
        return cost

    def _waiting(self, cost: Counter[str], started_s: float) -> float:
        """Seconds that starting operators adds to what they take."""
        running = cost.total() - cost["idle"]
        return max(0.0, started_s - running) if self.hardware.asynchronous else started_s

    def _matmul(self, work: _Pass, keys_and_values: bool = False) -> float:
        """Products of one layer, or of its first part; a backward makes two of each, or one where the weight is not
        trained."""
        shape = self.shape
        fp8 = work.prompt and shape.fp8_prefix != "off" and shape.config.prefix.fp8_backend != "emulated"
        products, rows = products_of_layer(shape, work.rows.total), work.rows.total
        if keys_and_values:
            products = products[:1]
        once = sum(self._product(rows, used, held, fp8) for used, held in products)
        return once * (work.forwards + work.backward * (1 if shape.adapter_rank is not None else 2))

    def _product(self, rows: int, used: float, held: float, fp8: bool = False) -> float:
        """Of rows with weights: `used` of them by each row, `held` read. Few rows wait for the weights."""
        curve = self.hardware.matmul_fp8 if fp8 else self.hardware.matmul
        return max(curve.seconds(2 * rows * used), self.hardware.memory.seconds(held * self.shape.element_bytes))

    def _head(self, work: _Pass) -> float:
        """Logits of responses: once forward, again in backward, and the gradients of rows and weight."""
        weights = self.shape.padded_vocab * self.shape.model.hidden_size
        return work.head * self._product(work.rows.total, weights, weights) * (1 + 3 * work.backward)

    def _attention(self, work: _Pass) -> float:
        """The rank with the first slice of a chunk has its keys seen by all later rows."""
        shape, rows = self.shape, work.rows
        queries = rows.total * shape.cp
        pairs = queries * work.keys / shape.cp
        if work.prompt and shape.cp > 1:
            pairs += queries * rows.length * (shape.cp - 1) / (2 * shape.cp)
        flops = 4 * shape.query_width * pairs
        blocks = self._blocks(work)
        kv = self.prompts * work.keys / shape.cp * 2 * shape.key_width * shape.kv_bytes
        forward = blocks * self.hardware.attention.seconds(flops / blocks)
        seconds = max(forward, self.hardware.attention_read.seconds(kv)) * work.attention_forwards
        if work.backward:
            backward = ATTENTION_BACKWARD * flops / blocks
            seconds += blocks * self.hardware.attention_backward.seconds(backward)
        return seconds

    def _elementwise(self, work: _Pass, layer: Layer, keys_and_values: bool = False) -> float:
        """What a layer's tensors take to be written once and read twice, and per block of stored tokens the sums."""
        forward, both = Tape(), Tape()
        run, run_backward = layer.forward, layer.backward
        if keys_and_values:
            run, run_backward = layer.keys_and_values, layer.keys_and_values_backward
        run(forward, grad=False)
        run(both, grad=True)
        before = len(both.created)
        run_backward(both)
        merged = layer.query * layer.widen * self.shape.cp
        blocks = max(0.0, self._blocks(work) - 1)
        seconds = work.forwards * self._touched(forward.created) + work.backward * self._touched(both.created[before:])
        if keys_and_values:
            return seconds
        return seconds + (work.attention_forwards + work.backward) * blocks * self._touched([merged])

    def _touched(self, created: list[float]) -> float:
        return sum(self.hardware.memory.seconds(TOUCHED * num_bytes) for num_bytes in created)

    def _blocks(self, work: _Pass) -> float:
        return max(1.0, work.keys / self.shape.cp / self.shape.config.prefix.prefix_block_tokens)

    def _layer_communication(self, work: _Pass) -> Counter[str]:
        """Of one layer. Context parallelism gathers queries and reduces outputs with their log-sum-exp; its backward
        gathers query, output and gradient and reduces the query's gradient. Tensor parallelism reduces twice in each
        direction, or gathers and reduces under sequence parallelism, whose backward gathers again."""
        shape, layer = self.shape, Layer(self.shape, work.rows)
        passes, cost = work.forwards + work.backward, Counter()
        if shape.cp > 1:
            curve, once = self._curve(shape.tp * shape.cp), layer.query * (shape.cp - 1)
            forward = _messages(curve, 3, once * (1 + layer.widen))
            backward = _messages(curve, 3, once * (3 + layer.widen))
            share = shape.attention_layers / shape.layers
            cost["cp"] = (work.attention_forwards * forward + work.backward * backward) * share
        if shape.tp > 1:
            curve, once = self._curve(shape.tp), layer.whole_stream * (shape.tp - 1) / shape.tp
            again = 2 * work.backward * shape.sp
            cost["tp"] = _messages(curve, passes * (4 if shape.sp else 2) + again, (4 * passes + again) * once)
        if shape.ep > 1:
            sent = 2 * shape.model.moe_router_topk * layer.stream * (shape.ep - 1) / shape.ep
            cost["ep"] = _messages(self._curve(shape.tp * shape.cp * shape.dp), 2 * passes, sent * passes)
        return cost

    def _host(self, work: _Pass, layers: float) -> float:
        """Stored K, V (and their gradients, both ways) of that many layers pass by for every micro-batch."""
        shape = self.shape
        kv, grad = (1 - fitting / shape.attention_layers for _, fitting in layers_on_device(shape))
        of_layer = work.keys / shape.cp * self.prompts * 2 * shape.key_width
        copied = of_layer * (kv * shape.kv_bytes + 2 * grad * shape.kv_grad_bytes * work.backward)
        if shape.out_tier == "host" and work.prompt:
            copied += work.rows.total * shape.query_width * shape.element_bytes
        return self.hardware.host.seconds(copied * layers)

    def _curve(self, ranks: int) -> Curve:
        """Of a group that spans this many neighbouring ranks."""
        return self.hardware.link if ranks <= GPUS_PER_NODE else self.hardware.network

    @staticmethod
    def _scaled(cost: Counter[str], times: float) -> Counter[str]:
        return Counter({kind: seconds * times for kind, seconds in cost.items()})


def _messages(curve: Curve, count: int, num_bytes: float) -> float:
    """Seconds of equal messages that have so many bytes together."""
    return count * curve.seconds(num_bytes / count)
