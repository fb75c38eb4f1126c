"""The oracle: stock Megatron-Core GPTModel, stock attention, plain autograd, one full sequence per response.

One process, no parallelism, no DDP, no schedule. Shares the model's shape and its initial weights with the
package (they define what is compared) and nothing of attention, positions, log-probs, losses or gradients.

    python tools/full_sequence_oracle.py CASE.pt OUTPUT.pt [CASE.pt OUTPUT.pt ...]

CASE.pt holds {"config": TOML text, "perturb_seed", "samples": [{"prompt", "response", "weights", "detach"}]};
OUTPUT.pt receives {"grads": {global name: tensor}, "logprobs": [tensor per sample]}. `detach` is the number of leading
tokens whose K, V are cut from the graph (0: the exact gradient; P - 1: what frozen computes).
"""
from __future__ import annotations

import math
import os
import sys

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_longstraw.config import load_toml
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.model import transformer_config
from megatron_longstraw.mcore.parameters import initialize_weights, named_shards


class DetachingAttention(DotProductAttention):
    """Stock attention in which the first `detach` keys and values carry no gradient."""

    detach = 0

    def forward(self, query, key, value, attention_mask, **kwargs):
        n = DetachingAttention.detach
        if n:
            key = torch.cat([key[:n].detach(), key[n:]])
            value = torch.cat([value[:n].detach(), value[n:]])
        return super().forward(query, key, value, attention_mask, **kwargs)


def build(config) -> GPTModel:
    model = config.model
    spec = get_gpt_layer_local_spec(
        num_experts=model.num_experts, qk_layernorm=model.qk_layernorm, normalization="RMSNorm"
    )
    spec.submodules.self_attention.submodules.core_attention = DetachingAttention
    gpt = GPTModel(
        transformer_config(config),
        spec,
        model.vocab_size,
        model.max_position_embeddings,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
    )
    if model.use_rope_scaling:
        gpt.rotary_pos_emb.inv_freq = _llama3_inv_freq(model)
    return gpt


def _llama3_inv_freq(model) -> torch.Tensor:
    """The published rule, dimension by dimension (transformers' modeling_rope_utils states the same)."""
    dim = int(model.kv_channels * model.rotary_percent)
    original = model.rope_scaling_original_max_position_embeddings
    values = []
    for i in range(0, dim, 2):
        freq = 1.0 / model.rotary_base ** (i / dim)
        wavelength = 2 * math.pi / freq
        if wavelength < original / model.rope_scaling_high_freq_factor:
            values.append(freq)
        elif wavelength > original / model.rope_scaling_low_freq_factor:
            values.append(freq / model.rope_scaling_factor)
        else:
            smooth = (original / wavelength - model.rope_scaling_low_freq_factor) / (
                model.rope_scaling_high_freq_factor - model.rope_scaling_low_freq_factor
            )
            values.append((1 - smooth) * freq / model.rope_scaling_factor + smooth * freq)
    return torch.tensor(values)


def perturb(gpt_chunks, model, seed: int) -> None:
    """Make norms and biases non-trivial, by global name, so that every layout gets the same values."""
    for shard, parameter in named_shards(gpt_chunks, model):
        if shard.name.endswith(("norm.weight", ".bias")):
            generator = torch.Generator().manual_seed(seed + sum(shard.name.encode()))
            noise = 0.1 * torch.randn(shard.full_shape, generator=generator)
            with torch.no_grad():
                parameter += shard.cut(noise).to(parameter.dtype)


def run(case: dict) -> dict:
    config = load_toml(case["config"]).resolve()
    parallel.initialize(config)
    gpt = build(config)
    initialize_weights([gpt], config.model, config.run.seed)
    perturb([gpt], config.model, case["perturb_seed"])
    if config.model.bf16:
        gpt.bfloat16()
    logprobs = []
    for sample in case["samples"]:
        prompt, response, weights = (sample[name] for name in ("prompt", "response", "weights"))
        DetachingAttention.detach = sample["detach"]
        ids = torch.cat([prompt, response[:-1]])[None]
        length = ids.shape[1]
        mask = torch.ones(1, 1, length, length).triu(1).bool()
        logits = gpt(ids, torch.arange(length)[None], mask).float()[0, len(prompt) - 1 :]
        table = torch.log_softmax(logits / config.rollout.temperature, dim=-1)
        logprob = table.gather(1, response[:, None])[:, 0]
        (logprob * weights).sum().backward()
        logprobs.append(logprob.detach())
    grads = {}
    for shard, parameter in named_shards([gpt], config.model):
        grads[shard.name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.float()
    return {"grads": grads, "logprobs": logprobs}


def main(files: list[str]) -> None:
    for case, output in zip(files[::2], files[1::2]):
        # Written under another name first: several runs may share one folder of answers.
        unfinished = f"{output}.{os.getpid()}"
        torch.save(run(torch.load(case)), unfinished)
        os.rename(unfinished, output)


if __name__ == "__main__":
    main(sys.argv[1:])
