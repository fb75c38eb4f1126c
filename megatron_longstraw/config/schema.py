"""The sections of a run's configuration and every field in them.

What Megatron owns keeps Megatron's spelling. Field names are unique over all sections, so each field is also a
flat flag: `context_parallel_size` is `--context-parallel-size`.
"""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from megatron_longstraw.config.settings import Setting, option, settings_of

_MODULE_FUNCTION = {"pattern": r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", "form": "module:function"}
_TEXT = {"pattern": r".+", "form": "a text"}
_CLIP = {
    "above": 0.0,
    "below": 1.0,
    "hint": "it is an offset from a ratio of 1, not a bound: 0.28, not 1.28, lets the ratio grow to 1.28",
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: a decoder of Megatron-Core with rotary positions, SwiGLU and RMSNorm."""

    num_layers: int = option(2, "transformer layers", minimum=1)
    hidden_size: int = option(64, "width of the residual stream", minimum=1)
    ffn_hidden_size: int | None = option(None, "inner width of the SwiGLU MLP; none: 4 * hidden_size", minimum=1)
    num_attention_heads: int = option(4, "query heads", minimum=1)
    num_query_groups: int | None = option(None, "key-value heads; none: one per query head", minimum=1)
    kv_channels: int | None = option(None, "size of a head; none: hidden_size / num_attention_heads", minimum=2)
    vocab_size: int = option(256, "vocabulary entries, padding not counted", minimum=1)
    make_vocab_size_divisible_by: int = option(
        128, "pad the vocabulary to a multiple of this times the tensor parallel size", minimum=1
    )
    max_position_embeddings: int = option(4194304, "longest prompt plus response, in tokens", minimum=1)
    position_embedding_type: str = option("rope", "rotary embedding", choices=("rope", "yarn"))
    rotary_base: float = option(10000.0, "base of the rotary frequencies", above=0.0)
    rotary_percent: float = option(1.0, "share of a head's channels that rotate", above=0.0, maximum=1.0)
    use_rope_scaling: bool = option(False, "scale the rotary frequencies the Llama 3 way")
    rope_scaling_factor: float = option(8.0, "Llama 3 scaling: stretch of the low frequencies", minimum=1.0)
    rope_scaling_low_freq_factor: float = option(
        1.0, "Llama 3 scaling: wavelengths over original context / this are stretched fully", above=0.0
    )
    rope_scaling_high_freq_factor: float = option(
        4.0, "Llama 3 scaling: wavelengths under original context / this are left alone", above=0.0
    )
    rope_scaling_original_max_position_embeddings: int = option(
        8192, "Llama 3 scaling: context length of pre-training", minimum=1
    )
    rotary_seq_len_interpolation_factor: float = option(
        1.0, "linear scaling: positions are divided by this", minimum=1.0
    )
    yarn_rotary_scaling_factor: float = option(4.0, "YaRN: stretch of the context", minimum=1.0)
    yarn_original_max_position_embeddings: int = option(4096, "YaRN: context length of pre-training", minimum=1)
    yarn_beta_fast: float = option(32.0, "YaRN: rotations above which a channel is left alone", above=0.0)
    yarn_beta_slow: float = option(1.0, "YaRN: rotations below which a channel is stretched fully", above=0.0)
    yarn_mscale: float = option(1.0, "YaRN: attention temperature coefficient", minimum=0.0)
    yarn_mscale_all_dim: float = option(0.0, "YaRN: attention temperature coefficient of all channels", minimum=0.0)
    normalization: str = option("RMSNorm", "normalization layer", choices=("RMSNorm",))
    norm_epsilon: float = option(1e-5, "added to the variance inside the norm", above=0.0)
    qk_layernorm: bool = option(False, "normalize queries and keys per head")
    add_qkv_bias: bool = option(False, "bias in the query, key, value projection")
    untie_embeddings_and_output_weights: bool = option(False, "give the LM head weights of its own")
    softmax_scale: float | None = option(None, "factor on attention scores; none: 1 / sqrt(kv_channels)", above=0.0)
    num_experts: int | None = option(None, "experts per layer; none: a dense model", minimum=1)
    moe_router_topk: int = option(2, "experts a token is sent to", minimum=1)
    moe_router_pre_softmax: bool | None = option(
        None,
        "weigh chosen experts by the softmax over all experts instead of over the chosen; none: only with topk 1, "
        "where the other is constant",
    )
    moe_ffn_hidden_size: int | None = option(None, "inner width of an expert; none: ffn_hidden_size", minimum=1)
    moe_shared_expert_intermediate_size: int | None = option(
        None, "inner width of the experts every token passes; none: no such experts", minimum=1
    )
    moe_token_dispatcher_type: str = option(
        "alltoall", "how tokens reach their experts", choices=("alltoall", "allgather")
    )
    moe_aux_loss_coeff: float = option(0.0, "load-balancing loss; only 0 is accepted", minimum=0.0)
    moe_expert_capacity_factor: float | None = option(None, "token capacity of an expert; only none is accepted")
    moe_input_jitter_eps: float | None = option(None, "router input noise; only none is accepted")
    init_method_std: float = option(0.02, "standard deviation of random initial weights", minimum=0.0)
    hidden_dropout: float = option(0.0, "dropout on hidden states; only 0 is accepted", minimum=0.0, maximum=1.0)
    attention_dropout: float = option(0.0, "dropout on attention; only 0 is accepted", minimum=0.0, maximum=1.0)
    transformer_impl: str = option(
        "auto",
        "layers to build; auto: transformer_engine where it is installed, else local",
        choices=("auto", "local", "transformer_engine"),
    )
    bf16: bool = option(False, "compute in bfloat16; otherwise float32")
    fp16: bool = option(False, "compute in float16; not accepted")

    def resolve(self) -> ModelConfig:
        ffn_hidden_size = _default(self.ffn_hidden_size, 4 * self.hidden_size)
        # Megatron refuses an expert width in a dense model.
        moe_ffn_hidden_size, pre_softmax = self.moe_ffn_hidden_size, self.moe_router_pre_softmax
        if self.num_experts is not None:
            moe_ffn_hidden_size = _default(moe_ffn_hidden_size, ffn_hidden_size)
            pre_softmax = _default(pre_softmax, self.moe_router_topk == 1)
        return dataclasses.replace(
            self,
            ffn_hidden_size=ffn_hidden_size,
            num_query_groups=_default(self.num_query_groups, self.num_attention_heads),
            kv_channels=_default(self.kv_channels, self.hidden_size // max(1, self.num_attention_heads)),
            moe_ffn_hidden_size=moe_ffn_hidden_size,
            moe_router_pre_softmax=pre_softmax,
        )

    def padded_vocab_size(self, tp_size: int) -> int:
        """Megatron's padding: up to a multiple of make_vocab_size_divisible_by * tp."""
        multiple = self.make_vocab_size_divisible_by * tp_size
        return -(-self.vocab_size // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model and the tokens are split over the ranks, and what is recomputed to save memory."""

    tensor_model_parallel_size: int = option(1, "ranks that share each weight matrix", minimum=1)
    pipeline_model_parallel_size: int = option(1, "pipeline stages the layers are split into", minimum=1)
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None, "model chunks per pipeline rank (interleaved schedule); none: not interleaved", minimum=1
    )
    context_parallel_size: int = option(1, "ranks that share the tokens of a sequence", minimum=1)
    expert_model_parallel_size: int = option(1, "ranks that share the experts of a layer", minimum=1)
    sequence_parallel: bool = option(False, "split tokens over the tensor parallel ranks outside the matmuls")
    use_distributed_optimizer: bool = option(False, "split the optimizer state over the data parallel ranks")
    overlap_grad_reduce: bool = option(False, "reduce gradients while the last backward still runs")
    recompute_granularity: str | None = option(
        None,
        "recompute activations in backward: full layers, or none",
        choices=("full",),
        hint="selective is refused: recompute of core attention would run attention twice on one input",
    )
    recompute_method: str | None = option(
        None, "which layers of a stage to recompute; none: uniform under full", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = option(None, "layers per recomputed unit; none: 1 under full", minimum=1)
    distributed_timeout_minutes: float = option(10.0, "a collective that waits longer fails the run", above=0.0)

    def resolve(self) -> ParallelConfig:
        if self.recompute_granularity is None:
            return self
        return dataclasses.replace(
            self,
            recompute_method=_default(self.recompute_method, "uniform"),
            recompute_num_layers=_default(self.recompute_num_layers, 1),
        )


@dataclass(frozen=True, kw_only=True)
class PrefixConfig:
    """The shared prompt: how it is captured, kept and walked back."""

    schedule: str = option(
        "branch",
        "branch: the prompt once and its responses apart; full: one whole sequence per response",
        choices=("branch", "full"),
    )
    prefix_grad: str = option(
        "exact",
        "gradient through the prompt: exact, frozen (none: biased), or last:N (its last N chunks only)",
        pattern=r"exact|frozen|last:[1-9][0-9]*",
        form="exact, frozen or last:N with N >= 1",
    )
    prefix_out_tier: str | None = option(
        None,
        "where capture keeps each chunk's attention output for the walk back (none: recomputed there); "
        "unset: device, but none under frozen",
        choices=("none", "device", "host"),
    )
    prefix_kv_dtype: str | None = option(
        None,
        "how stored keys and values are kept, and read by the prompt and its responses alike: fp8 is e4m3 codes with a "
        "float32 scale per token and head; unset: in the model's dtype",
        choices=("bf16", "fp8"),
    )
    prefix_grad_dtype: str = option(
        "fp32", "how the gradients of stored keys and values are summed up", choices=("fp32", "bf16")
    )
    prefix_kv_tier: str = option(
        "device",
        "memory that stored keys, values and their gradients are kept in; what is on the host is copied block by block "
        "at every use, each decoding step included",
        choices=("device", "host"),
    )
    prefix_device_bytes: int | None = option(
        None,
        "under prefix_kv_tier host, bytes per rank of each capture that stay on the device: keys and values of as many "
        "layers as fit, then gradients; none: nothing",
        minimum=0,
        is_bytes=True,
    )
    prefix_chunk_tokens: int = option(2048, "prompt tokens per capture and backward micro-batch", minimum=1)
    prefix_activation_bytes: int | None = option(
        None,
        "choose prefix_chunk_tokens: the largest chunk whose activations, by the plan's estimate, fit in these bytes per "
        "rank; none: it is given",
        minimum=1,
        is_bytes=True,
    )
    prefix_block_tokens: int = option(8192, "largest key-value block of one attention call, in tokens", minimum=1)
    prefix_mlp_block_tokens: int | None = option(
        None,
        "rows of a prompt chunk on one rank that go through a layer's MLP at once, and again in the walk back; none: all",
        minimum=1,
    )
    fp8_prefix: str = option(
        "off",
        "linear layers of the prompt passes in FP8: off, one scale per tensor, or one per block of 128",
        choices=("off", "tensorwise", "blockwise"),
    )
    fp8_backend: str = option(
        "auto",
        "what runs them; auto: te (Transformer Engine) where its layers are built, else torch on a GPU, else emulated",
        choices=("auto", "te", "torch", "emulated"),
    )
    branches_per_microbatch: int = option(8, "responses replayed at once, per prompt", minimum=1)
    prompts_per_microbatch: int = option(1, "prompts of equal length that share a capture", minimum=1)
    prefix_state_budget: int | None = option(
        None,
        "bytes per rank, host memory included, for prefix states kept from rollout to update; none: keep all, 0: "
        "always capture again",
        minimum=0,
        is_bytes=True,
    )
    prefix_graph_bytes: int = option(
        0,
        "bytes per rank for autograd graphs of a prompt's last chunks, kept from capture to the walk back, which then "
        "does not run them again; 0: none",
        minimum=0,
        is_bytes=True,
    )
    log_probs_chunk_size: int = option(1024, "rows through the LM head at once", minimum=1)

    def resolve(self) -> PrefixConfig:
        tier = "none" if self.prefix_grad == "frozen" else "device"
        device_bytes = _default(self.prefix_device_bytes, 0 if self.prefix_kv_tier == "host" else None)
        return dataclasses.replace(
            self, prefix_out_tier=_default(self.prefix_out_tier, tier), prefix_device_bytes=device_bytes
        )

    def num_chunks_walked_back(self, num_chunks: int) -> int:
        """How many of a prompt's chunks, counted from its end, run again under autograd."""
        if self.prefix_grad == "exact":
            return num_chunks
        if self.prefix_grad == "frozen":
            return 0
        return min(int(self.prefix_grad.removeprefix("last:")), num_chunks)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled."""

    group_size: int = option(
        8,
        "responses per prompt",
        minimum=1,
        hint="a group of size 0 has nothing to learn from",
        aliases=("n", "n-samples-per-prompt"),
    )
    max_prompt_length: int | None = option(None, "longest prompt in tokens; none: no limit", minimum=1)
    max_response_length: int = option(
        64, "longest response in tokens", minimum=1, aliases=("rollout-max-response-len",)
    )
    temperature: float = option(1.0, "sampling temperature", above=0.0, aliases=("rollout-temperature",))
    top_p: float = option(1.0, "sample from the likeliest tokens of this total probability", above=0.0, maximum=1.0)
    stop_token_ids: tuple[int, ...] = option((), "token ids that end a response", minimum=0)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Advantages, the policy loss, and how a step's prompts become optimizer steps."""

    adv_estimator: str = option("grpo", "advantage of a response within its group", choices=("grpo",))
    norm_adv_by_std_in_grpo: bool = option(True, "divide advantages by the group's standard deviation")
    clip_ratio: float = option(0.2, "how far the policy ratio may leave 1, both ways", **_CLIP)
    clip_ratio_low: float | None = option(None, "the same, downwards; none: clip_ratio", **_CLIP)
    clip_ratio_high: float | None = option(None, "the same, upwards; none: clip_ratio", **_CLIP)
    loss_agg_mode: str = option(
        "token-mean",
        "how token losses become one number",
        choices=("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"),
    )
    ppo_epochs: int = option(1, "passes over a step's responses", minimum=1)
    ppo_mini_batch_size: int | None = option(
        None, "prompts (whole groups) per optimizer step; none: train_batch_size", minimum=1
    )
    train_batch_size: int = option(
        1, "prompts per step, over all data parallel ranks", minimum=1, aliases=("rollout-batch-size",)
    )

    def resolve(self) -> AlgorithmConfig:
        return dataclasses.replace(
            self,
            clip_ratio_low=_default(self.clip_ratio_low, self.clip_ratio),
            clip_ratio_high=_default(self.clip_ratio_high, self.clip_ratio),
            ppo_mini_batch_size=_default(self.ppo_mini_batch_size, self.train_batch_size),
        )

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps that a step takes, if every mini-batch has something to learn from; of a resolved section."""
        return self.ppo_epochs * max(1, self.train_batch_size // max(1, self.ppo_mini_batch_size))


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How a response is scored."""

    reward_function: str = option(
        "megatron_longstraw.rewards.exact_match:score", "module:function that scores a response", **_MODULE_FUNCTION
    )
    reward_error_policy: str = option(
        "fail",
        "when scoring raises: fail the run, score zero, or skip the response",
        choices=("fail", "zero", "skip"),
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts from files, rollouts from files, and the tokenizer between text and ids."""

    train_files: tuple[str, ...] = option(
        (), "JSONL or Parquet files of prompts, read in this order", aliases=("prompt-data",)
    )
    prompt_key: str = option("prompt", "column of the prompt: a text or a list of messages", aliases=("input-key",), **_TEXT)
    answer_key: str = option("answer", "column of the right answer, in files without reward_model", aliases=("label-key",), **_TEXT)
    data_source_key: str = option("data_source", "column that names the source", aliases=("reward-fn-key",), **_TEXT)
    reward_model_key: str = option("reward_model", "column that holds {ground_truth: the right answer}", **_TEXT)
    extra_info_key: str = option("extra_info", "column of what else the reward function wants to know", **_TEXT)
    id_key: str = option("id", "column that names the row", **_TEXT)
    tokenizer_model: str | None = option(
        None, "tokenizer: a Hugging Face folder or tokenizer.json, or a SentencePiece .model; none: hf_checkpoint", **_TEXT
    )
    apply_chat_template: bool = option(False, "wrap text prompts as a user's message (messages always are one)")
    truncation: str = option(
        "error",
        "prompts over max_prompt_length: stop, keep the last tokens (left is cut), keep the first, or leave them out",
        choices=("error", "left", "right", "filter"),
    )
    shuffle: bool = option(True, "read prompts in an order drawn anew each epoch")
    max_row_bytes: int = option(2**28, "largest row of a prompt or rollout file", minimum=1, is_bytes=True)
    rollout_file: str | None = option(
        None, "JSONL of rollouts to train on instead of sampling", aliases=("load-debug-rollout-data",), **_TEXT
    )
    save_rollouts: bool = option(True, "write every rollout to rollouts.jsonl in run_dir")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where weights come from and go to."""

    hf_checkpoint: str | None = option(
        None, "Hugging Face model folder: the model's shape, and its weights unless load is given", **_TEXT
    )
    load: str | None = option(
        None, "Megatron checkpoint folder: a trained one goes on where it stopped, a converted one gives its weights", **_TEXT
    )
    finetune: bool = option(False, "take the weights of load only: step 0, a new optimizer")
    save: str | None = option(None, "folder for the run's checkpoints; none: they are not written", **_TEXT)
    save_interval: int | None = option(None, "steps between checkpoints; none: one after the last step", minimum=1)
    async_save: bool = option(False, "write checkpoints in the background")
    max_ckpt_to_keep: int | None = option(None, "checkpoints that are kept, newest first; none: all", minimum=1)
    save_retain_interval: int | None = option(
        None, "keep checkpoints of these steps (multiples of it) beside the newest", minimum=1
    )
    resume_mode: str = option(
        "auto",
        "auto: go on from the newest checkpoint in save, if there is one; disable: never; resume_path: from load",
        choices=("auto", "disable", "resume_path"),
    )
    save_hf: str | None = option(
        None, "folder for the trained model in Hugging Face format, with hf_checkpoint's other files", **_TEXT
    )
    backfill: bool = option(
        False, "leave tensors of hf_checkpoint that the model has no place for out, and copy them into save_hf"
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam and its learning rate."""

    lr: float = option(1e-6, "largest learning rate", minimum=0.0)
    min_lr: float = option(0.0, "learning rate at the end of the decay", minimum=0.0)
    lr_decay_style: str = option(
        "constant", "learning rate after the warmup", choices=("constant", "linear", "cosine")
    )
    lr_warmup_iters: int = option(0, "optimizer steps in which the learning rate rises linearly from 0", minimum=0)
    lr_decay_iters: int | None = option(
        None, "optimizer steps until min_lr, warmup included; none: those of train_iters steps", minimum=1
    )
    weight_decay: float = option(0.01, "decoupled weight decay", minimum=0.0)
    adam_beta1: float = option(0.9, "decay of the gradient average", minimum=0.0, below=1.0)
    adam_beta2: float = option(0.999, "decay of the squared gradient average", minimum=0.0, below=1.0)
    adam_eps: float = option(1e-8, "added to Adam's denominator", above=0.0)
    clip_grad: float = option(1.0, "largest norm of the gradient; 0: not clipped", minimum=0.0)
    optimizer_cpu_offload: bool = option(
        False, "keep master weights and averages in host memory and update there; with bf16, use_distributed_optimizer"
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length, data and place of the run."""

    train_iters: int = option(1, "steps (rollout and update) to run", minimum=1)
    seed: int = option(1234, "seed of weights and sampling", minimum=0)
    prompt_function: str | None = option(None, "module:function that yields prompts", **_MODULE_FUNCTION)
    run_dir: str = option("runs/default", "folder for what the run writes", pattern=r".+", form="a folder")
    nonfinite_policy: str = option(
        "skip", "when loss or gradient is not finite: skip the update, or stop", choices=("skip", "stop")
    )
    max_consecutive_nonfinite_steps: int = option(5, "stop after this many skipped updates in a row", minimum=1)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Where metrics go beside run_dir (metrics.jsonl, tensorboard), and what a long step shows."""

    wandb_project: str | None = option(
        None, "send metrics to this project of Weights & Biases (WANDB_MODE=offline: to disk only); none: do not", **_TEXT
    )
    wandb_exp_name: str | None = option(None, "name of the run there; none: the last part of run_dir", **_TEXT)
    wandb_save_dir: str | None = option(None, "folder for its local files; none: run_dir", **_TEXT)
    progress_interval_s: float = option(
        30.0, "seconds without a line after which a running step says how far it is (a terminal shows bars)", above=0.0
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """Names of the fields that a file, a flag or an override set, whether or not to another value."""

    def resolve(self) -> Config:
        """The same run with every default that follows from another field filled in."""
        return dataclasses.replace(
            self,
            model=self.model.resolve(),
            parallel=self.parallel.resolve(),
            prefix=self.prefix.resolve(),
            algorithm=self.algorithm.resolve(),
        )

    def rows_of_rank(self, num_tokens: int) -> int:
        """Rows of one rank outside the matmuls for a sequence of that many tokens, pads included."""
        parallel = self.parallel
        tp = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        # A size below 1 is a problem of its own field.
        return -(-num_tokens // max(1, parallel.context_parallel_size * tp))


def _default(value, otherwise):
    return otherwise if value is None else value


SECTIONS: dict[str, type] = {
    part.name: part.default_factory for part in dataclasses.fields(Config) if part.name != "given"
}
"""Section name -> its dataclass."""

SETTINGS: dict[str, Setting] = {
    setting.name: setting for name, section in SECTIONS.items() for setting in settings_of(name, section)
}
"""Field name -> what is known about it, over all sections."""
