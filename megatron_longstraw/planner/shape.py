"""A run as the planner sees it: its configuration, the ranks, and where and how its prefix state is kept."""
from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from megatron_longstraw.config import SETTINGS, Config, ModelConfig

FLOAT32 = 4
GIB = 2**30


@dataclass(frozen=True)
class LinearAttention:
    """Layers whose prompt state does not grow with the prompt (Gated DeltaNet), and the gate on the outputs of the
    others. Only the planner knows them."""

    num_layers: int
    num_key_heads: int
    num_value_heads: int
    head_channels: int
    conv_kernel: int

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.head_channels

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.head_channels

    @property
    def conv_width(self) -> int:
        return 2 * self.key_width + self.value_width

    @property
    def state_bytes(self) -> int:
        """One layer's record at one chunk boundary: the float32 state and the bfloat16 tail of the convolution."""
        recurrent = self.num_value_heads * self.head_channels**2 * FLOAT32
        return recurrent + (self.conv_kernel - 1) * self.conv_width * 2


@dataclass(frozen=True)
class Shape:
    """What a run's bytes and seconds depend on. `config` is resolved and valid for `world_size` ranks."""

    config: Config
    world_size: int
    kv_dtype: str | None = None
    """Of stored K, V: bf16, fp8, or None for the model's."""
    kv_grad_dtype: str = "fp32"
    """Of dK, dV: fp32 or bf16."""
    kv_tier: str = "device"
    """Where K, V, dK, dV beyond `device_bytes` lie: device or host."""
    device_bytes: int | None = None
    """Bytes of prefix state that may stay on the device under kv_tier host, in whole layers; None: none."""
    out_tier: str = "device"
    """Where (out, lse) of the chunks that are walked back are kept: device, host or none."""
    fp8_prefix: str = "off"
    """Linear layers of capture and walk back: off, tensorwise or blockwise; run by the configuration's fp8_backend."""
    optimizer_cpu_offload: bool = False
    adapter_rank: int | None = None
    """Low-rank adapters on every linear layer are trained, and nothing else."""
    adapter_scope: str = "all"
    """all: adapters act on every token; responses: on responses only, which leaves the prompt nothing to pass on."""
    linear: LinearAttention | None = None

    def changed(self, **values) -> Shape:
        """The same run with other values of fields of its own, or of fields of the configuration by their names."""
        own = {name: values.pop(name) for name in list(values) if name in _OWN}
        config, sections = self.config, {}
        for name, value in values.items():
            sections.setdefault(SETTINGS[name].section, {})[name] = value
        for section, fields in sections.items():
            part = dataclasses.replace(getattr(config, section), **fields)
            config = dataclasses.replace(config, **{section: part})
        return dataclasses.replace(self, config=config.resolve(), **own)

    # -- layout ----------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def tp(self) -> int:
        return self.config.parallel.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        return self.config.parallel.pipeline_model_parallel_size

    @property
    def cp(self) -> int:
        return self.config.parallel.context_parallel_size

    @property
    def ep(self) -> int:
        return self.config.parallel.expert_model_parallel_size

    @property
    def dp(self) -> int:
        """Replicas."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def sp(self) -> bool:
        return self.config.parallel.sequence_parallel

    @property
    def stream_split(self) -> int:
        """Ranks that share the rows outside matrix products."""
        return self.tp if self.sp else 1

    # -- the model on a rank ---------------------------------------------------------------------------------

    @property
    def element_bytes(self) -> int:
        return 2 if self.model.bf16 else FLOAT32

    @property
    def layers(self) -> int:
        """Of one pipeline stage."""
        return self.model.num_layers // self.pp

    @property
    def attention_layers(self) -> float:
        """Of one pipeline stage, with a K, V state that grows."""
        every = self.model.num_layers - (self.linear.num_layers if self.linear else 0)
        return every / self.pp

    def shortened_layers(self, stage: int) -> int:
        """Layers of a stage that a prompt chunk asks for K, V alone: the model's last one."""
        return int(stage == self.pp - 1)

    @property
    def heads(self) -> int:
        return self.model.num_attention_heads // self.tp

    @property
    def query_width(self) -> int:
        return self.heads * self.model.kv_channels

    @property
    def key_width(self) -> int:
        return self.model.num_query_groups // self.tp * self.model.kv_channels

    @property
    def padded_vocab(self) -> int:
        """Vocabulary entries of one rank."""
        return self.model.padded_vocab_size(self.tp) // self.tp

    # -- prefix state ----------------------------------------------------------------------------------------

    @property
    def kv_elements(self) -> float:
        """K and V of one token in all layers of a rank."""
        return self.attention_layers * 2 * self.key_width

    @property
    def kv_bytes(self) -> float:
        """Of an element of K or V; FP8 comes with a float32 scale per token and head."""
        if self.kv_dtype == "fp8":
            return 1 + FLOAT32 / self.model.kv_channels
        return 2 if self.kv_dtype == "bf16" else self.element_bytes

    @property
    def kv_grad_bytes(self) -> int:
        """Of an element of dK or dV."""
        return 2 if self.kv_grad_dtype == "bf16" else FLOAT32

    @property
    def block_tokens(self) -> int:
        """Stored tokens of one attention call."""
        return min(self.config.prefix.prefix_block_tokens, -(-self.prefix_tokens // self.cp))

    @property
    def block_bytes(self) -> int:
        """K and V, or their gradients, of one block of one layer, in the model's precision."""
        return self.prompts_per_capture * self.block_tokens * 2 * self.key_width * self.element_bytes

    @property
    def blocks_in_use(self) -> int:
        """What one attention call reads or makes lives on while the next one's appears."""
        return min(2, -(-self.prefix_tokens // (self.cp * max(1, self.block_tokens))))

    @property
    def rounds_kv(self) -> bool:
        """K, V are stored in fewer bits than they are computed in."""
        return self.kv_bytes < self.element_bytes

    @property
    def staged_kv_bytes(self) -> float:
        """K, V of stored tokens beside the store while attention reads them: as they come from the host and as they are
        read."""
        blocks = self.blocks_in_use
        copied = self.kv_bytes / self.element_bytes * (self.kv_tier == "host")
        # FP8 codes pass through float32, K and V one after the other.
        widened = FLOAT32 / self.element_bytes / 2 * (self.kv_dtype == "fp8" and self.element_bytes < FLOAT32)
        return self.block_bytes * (blocks * copied + (blocks + widened) * self.rounds_kv)

    @property
    def staged_grad_bytes(self) -> float:
        """dK, dV of a block that are brought from the host to be added to."""
        return self.block_bytes * self.kv_grad_bytes / self.element_bytes * (self.kv_tier == "host")

    # -- tokens ----------------------------------------------------------------------------------------------

    @property
    def row_multiple(self) -> int:
        """A rank's rows of a chunk are padded to a multiple of it: sequence parallelism splits them, FP8 products take
        16 at a time, and Transformer Engine as many of each rank's share, or a block of 128. Backend auto counts as one
        that takes 16."""
        backend = self.config.prefix.fp8_backend
        if self.fp8_prefix == "off" or backend == "emulated":
            return self.stream_split
        if backend == "te" and self.sp:
            return self.tp * (128 if self.fp8_prefix == "blockwise" else 16)
        return math.lcm(self.stream_split, 16)

    def rows(self, num_tokens: int, multiple: int | None = None) -> int:
        """Rows per context-parallel rank of that many tokens, pads included; `multiple` None: without FP8's."""
        multiple = self.stream_split if multiple is None else multiple
        return -(-num_tokens // (self.cp * multiple)) * multiple

    def chunk_rows(self) -> int:
        """Of the longest chunk of one prompt, on a rank."""
        longest = self.config.rollout.max_prompt_length or self.config.prefix.prefix_chunk_tokens
        return self.rows(min(self.config.prefix.prefix_chunk_tokens, longest), self.row_multiple)

    @property
    def prefix_tokens(self) -> int:
        """Stored: the last prompt token goes with the responses. 0 under --schedule full or without a longest one."""
        full = self.config.prefix.schedule == "full"
        return 0 if full else (self.config.rollout.max_prompt_length or 1) - 1

    @property
    def num_chunks(self) -> int:
        return -(-self.prefix_tokens // self.config.prefix.prefix_chunk_tokens)

    @property
    def num_chunks_walked_back(self) -> int:
        if self.adapter_rank is not None and self.adapter_scope == "responses":
            return 0
        return self.config.prefix.num_chunks_walked_back(self.num_chunks)

    @property
    def tokens_walked_back(self) -> int:
        chunk = self.config.prefix.prefix_chunk_tokens
        return min(self.prefix_tokens, self.prefix_tokens - (self.num_chunks - self.num_chunks_walked_back) * chunk)

    @property
    def prompts_of_update(self) -> int:
        """Of one replica."""
        return -(-self.config.algorithm.ppo_mini_batch_size // self.dp)

    @property
    def prompts_per_capture(self) -> int:
        return min(self.config.prefix.prompts_per_microbatch, self.prompts_of_update)


_OWN = {field.name for field in dataclasses.fields(Shape)}


def shape_of(config: Config, world_size: int) -> Shape:
    """The shape that a configuration asks for; the one place where its fields become the planner's."""
    config = config.resolve()
    prefix = config.prefix
    return Shape(
        config,
        world_size,
        kv_dtype=prefix.prefix_kv_dtype,
        kv_grad_dtype=prefix.prefix_grad_dtype,
        kv_tier=prefix.prefix_kv_tier,
        device_bytes=prefix.prefix_device_bytes,
        out_tier=prefix.prefix_out_tier,
        fp8_prefix=prefix.fp8_prefix,
        optimizer_cpu_offload=config.optimizer.optimizer_cpu_offload,
    )


_QWEN36_27B = (
    ModelConfig(
        num_layers=64,
        hidden_size=5120,
        ffn_hidden_size=17408,
        num_attention_heads=24,
        num_query_groups=4,
        kv_channels=256,
        vocab_size=248320,
        rotary_percent=0.25,
        qk_layernorm=True,
        untie_embeddings_and_output_weights=True,
        bf16=True,
    ),
    LinearAttention(num_layers=48, num_key_heads=16, num_value_heads=48, head_channels=128, conv_kernel=4),
)
"""From its config.json (class Qwen3_5ForCausalLM): the text model, without its extra prediction layer."""

PLANNED_MODELS = {"qwen3.6-27b": _QWEN36_27B}
