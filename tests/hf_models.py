"""Tiny Hugging Face folders of every family, as transformers writes them, with nothing at its initial value."""
from __future__ import annotations

import json
from pathlib import Path

import torch

from megatron_longstraw.config import load_config
from megatron_longstraw.convert.adopt import open_folder, with_model_of
from tests import tiny_tokenizers

ORIGINAL_TOKENS = 16
"""Context of pre-training that the scaled cases name; tests go to five times of it."""
SHAPE = dict(
    vocab_size=90,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=ORIGINAL_TOKENS,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=ORIGINAL_TOKENS)
EXPERTS = dict(head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True)
CASES: dict[str, tuple[str, dict]] = {
    "llama tied": ("LlamaConfig", dict(tie_word_embeddings=True)),
    "llama head_dim": ("LlamaConfig", dict(head_dim=32, tie_word_embeddings=False)),
    "llama llama3": ("LlamaConfig", dict(rope_parameters=LLAMA3)),
    "llama linear": ("LlamaConfig", dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0))),
    "llama yarn": ("LlamaConfig", dict(rope_parameters=YARN)),
    "mistral": ("MistralConfig", dict(sliding_window=None)),
    "qwen2 tied": ("Qwen2Config", dict(tie_word_embeddings=True)),
    "qwen2 yarn": ("Qwen2Config", dict(rope_parameters=YARN | {"attention_factor": 1.3, "rope_theta": 1e6})),
    "qwen3": ("Qwen3Config", dict(head_dim=32)),
    "qwen3 tied": ("Qwen3Config", dict(head_dim=32, tie_word_embeddings=True)),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS),
    "qwen3_moe raw": ("Qwen3MoeConfig", EXPERTS | {"norm_topk_prob": False}),
}


def make_folder(case: str, folder: Path, dtype=torch.float32, shard_bytes: int | None = None, **shape) -> Path:
    """Save the case's model with random norms and biases; returns the folder. `shape`: over SHAPE."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name, options = CASES[case]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SHAPE | options | shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1 + (1.0 if parameter.ndim == 1 else 0.0))
    model.to(dtype).save_pretrained(folder, **({"max_shard_size": shard_bytes} if shard_bytes else {}))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n')
    (folder / "chat_template.jinja").write_text("{{ messages }}\n")
    return folder


def make_whole_folder(folder: Path, **shape) -> Path:
    """A model with a tokenizer of its own (byte-level, with a chat template) that ends texts with the model's EOS."""
    shape = dict(vocab_size=320, eos_token_id=1) | shape
    files = {path.name: path.read_bytes() for path in tiny_tokenizers.byte_level(folder).iterdir()}
    make_folder("qwen2 tied", folder, **shape)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def edit_config(folder: Path, **changes) -> None:
    """Change keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def transformers_logits(folder: Path, ids) -> torch.Tensor:
    """float32 [tokens, vocab]"""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.as_tensor(ids)[None]).logits[0]


def adopt(folder: Path, **options):
    """(resolved configuration with the folder's model, the folder)"""
    config = load_config(overrides={"hf_checkpoint": str(folder), "max_response_length": 8, **options})
    source = open_folder(config)
    return with_model_of(config, source).resolve(), source
