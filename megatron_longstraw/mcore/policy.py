"""The policy: this rank's model chunks inside Megatron's DDP, the head, and the version of the weights."""
from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module

from megatron_longstraw.config import Config, ConfigError
from megatron_longstraw.convert.folder import HFFolder
from megatron_longstraw.mcore import cpu_runtime, fp8
from megatron_longstraw.mcore.checkpoint_folder import Checkpoint
from megatron_longstraw.mcore.logprobs import ResponseHead
from megatron_longstraw.mcore.model import build_model_chunks
from megatron_longstraw.mcore.parallel import Layout
from megatron_longstraw.mcore.weights import set_weights
from megatron_longstraw.metering import Meter
from megatron_longstraw.prefix.graphs import ChunkGraphs, GraphBudget
from megatron_longstraw.prefix.store import StaleStoreError
from megatron_longstraw.watchdog import Watchdog


class Policy:
    """What the calls of a step work on.

    `chunks` are the bare GPTModels, `ddp` the same wrapped for gradients: `param.main_grad` (float32) holds what
    backward has added since `zero_grad`, summed over dp-cp by `finalize_gradients`.
    """

    def __init__(
        self, config: Config, layout: Layout, hf_folder: HFFolder | None = None, checkpoint: Checkpoint | None = None
    ):
        """`checkpoint`, `hf_folder`: where the weights come from, see `set_weights`.

        Raises:
            ConfigError, FolderError: they do not fit the model; the size of a chunk is still to be chosen; or FP8 as asked
                for does not run here.
        """
        if config.prefix.prefix_activation_bytes is not None:
            raise ConfigError([
                f"got prefix_activation_bytes {config.prefix.prefix_activation_bytes} where nothing chooses a chunk by it, "
                "need prefix_chunk_tokens; change --prefix-activation-bytes or --prefix-chunk-tokens"
            ])  # fmt: skip
        self.layout, self.fp8 = layout, fp8.choose(config, layout.device)
        if self.fp8 is not None:  # what runs, where `auto` left it open
            config = replace(config, prefix=replace(config.prefix, fp8_backend=self.fp8.backend))
        self.config = config
        cpu_runtime.install()
        self.chunks: list[GPTModel] = build_model_chunks(config)
        set_weights(self.chunks, config, hf_folder, checkpoint)
        for chunk in self.chunks:
            chunk.to(layout.device)
        self.megatron_config = self.chunks[0].config
        self.ddp = [self._wrap(chunk) for chunk in self.chunks]
        self.head = None
        if layout.is_last_stage:
            self.head = ResponseHead(
                self.chunks[-1],
                config.model.vocab_size,
                config.rollout.temperature,
                config.prefix.log_probs_chunk_size,
                layout.groups.tp,
            )
        self.meter = Meter()
        self.watchdog: Watchdog | None = None
        """Told of every micro-batch, if there is one."""
        self._graph_budget = GraphBudget(config.prefix.prefix_graph_bytes)
        self._steps = 0
        self._checksum = self.checksum()

    def _wrap(self, chunk: GPTModel) -> DistributedDataParallel:
        parallel = self.config.parallel
        module = Float16Module(chunk.config, chunk) if self.config.model.bf16 else chunk
        return DistributedDataParallel(
            chunk.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=parallel.overlap_grad_reduce,
                use_distributed_optimizer=parallel.use_distributed_optimizer,
            ),
            module,
        )

    def describe(self) -> str:
        """Layout, device and what the run does with its prompts, for the start lines of a run."""
        text = f"{self.layout.describe()} on {self.layout.device.type}, prefix gradient {self.config.prefix.prefix_grad}"
        return text if self.fp8 is None else f"{text}, {self.fp8.describe()}"

    # -- gradients -------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Start a new gradient. `parameter.grad` goes too: an optimizer step leaves it aliased to `main_grad`
        (optimizer.py, FP32Optimizer.prepare_grads), and the next backward would count its first share twice."""
        for ddp in self.ddp:
            ddp.zero_grad_buffer()
            for parameter in ddp.parameters():
                parameter.grad = None

    @contextlib.contextmanager
    def no_sync(self):
        """Hold back overlapped gradient reduction: the prefix backward gives the head no gradient, so Megatron's
        ready counts never match inside a call (param_and_grad_buffer.py:206)."""
        with contextlib.ExitStack() as stack:
            for ddp in self.ddp:
                stack.enter_context(ddp.no_sync())
            yield

    def finalize_gradients(self) -> None:
        """Sum gradients over dp-cp (and tp, embedding groups), once per optimizer step.

        No token count is passed: token weights are already normalised over the global batch.
        """
        if self.config.parallel.overlap_grad_reduce:
            for ddp in self.ddp:
                groups = ddp.bucket_groups + ddp.expert_parallel_bucket_groups
                if not all(group.is_first_batch for group in groups):
                    ddp.start_grad_sync()
        finalize_model_grads(self.ddp, None)

    # -- calls -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def headless(self):
        """GPTModel returns hidden states instead of logits (gpt_model.py:608); the block keeps its final norm."""
        flags = [chunk.post_process for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.post_process = False
        try:
            yield
        finally:
            for chunk, flag in zip(self.chunks, flags):
                chunk.post_process = flag

    def chunk_graphs(self, walked_back: range) -> ChunkGraphs | None:
        """Where a capture keeps graphs of its last chunks; None: nowhere."""
        if not self._graph_budget.limit_bytes or not walked_back:
            return None
        storages = {p.untyped_storage().data_ptr() for chunk in self.chunks for p in chunk.parameters()}

        def least(number: int) -> int:
            value = torch.tensor(number, device=self.layout.device)
            dist.all_reduce(value, op=dist.ReduceOp.MIN, group=self.layout.cell)
            return int(value)

        return ChunkGraphs(walked_back, self._graph_budget, storages, least)

    def prefix_precision(self):
        """What the prompt passes run in, backward included: the linear layers in FP8 where asked for."""
        return contextlib.nullcontext() if self.fp8 is None else self.fp8.switched_on(self.chunks)

    @property
    def prefix_row_multiple(self) -> int:
        """Rows of a rank in a prompt pass must be a multiple of this."""
        return self.layout.row_multiple if self.fp8 is None else self.fp8.row_multiple(self.layout)

    # -- weights ---------------------------------------------------------------------------------------------

    @property
    def weights_version(self) -> int:
        """Optimizer steps so far. Checked by every call that reads a prefix store.

        Raises:
            StaleStoreError: the weights changed and nobody called `weights_changed`.
        """
        checksum = self.checksum()
        if checksum != self._checksum:
            raise StaleStoreError(
                "the weights changed without notice, so prefix states may belong to other weights: call "
                "policy.weights_changed() after every optimizer step of your own"
            )
        return self._steps

    def weights_changed(self) -> None:
        """Say that the weights moved: prefix states captured before are stale from here on."""
        self._steps += 1
        self._checksum = self.checksum()

    def checksum(self) -> int:
        """Sum of the bit patterns of all local parameters (one read of the weights; any single change shows)."""
        total = 0
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                bits = torch.int16 if parameter.element_size() == 2 else torch.int32
                total += int(parameter.detach().contiguous().view(bits).sum(dtype=torch.int64))
        return total
