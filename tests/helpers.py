"""A tiny policy and random groups, for tests of behaviour on top of exact gradients."""
from __future__ import annotations

import numpy as np
import torch

from megatron_longstraw.config import load_config
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.optimizer import PolicyOptimizer
from megatron_longstraw.mcore.parameters import named_shards
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.types import Branch, PromptGroup

TINY = dict(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=64,
    vocab_size=60,
    init_method_std=0.15,
    prefix_chunk_tokens=32,
    max_response_length=8,
    group_size=4,
    lr=1e-2,
    weight_decay=0.1,
    train_batch_size=2,
    seed=11,
)


def tiny_policy(**options) -> Policy:
    config = load_config(overrides=TINY | options).resolve()
    return Policy(config, parallel.initialize(config))


def tiny_trainer(**options) -> tuple[Policy, PolicyOptimizer]:
    policy = tiny_policy(**options)
    return policy, PolicyOptimizer(policy)


def random_groups(num_groups: int, prompt_tokens: int | list[int], response_tokens: list[int], seed: int = 0) -> list[PromptGroup]:
    """Groups with random ids and rewards; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    lengths = [prompt_tokens] * num_groups if isinstance(prompt_tokens, int) else prompt_tokens
    groups = []
    for number in range(num_groups):
        prompt = rng.integers(0, TINY["vocab_size"], lengths[number])
        branches = [
            Branch(rng.integers(0, TINY["vocab_size"], length), reward=float(rng.normal())) for length in response_tokens
        ]
        groups.append(PromptGroup(prompt, branches, group_id=number))
    return groups


def gradients(policy: Policy) -> dict[tuple, torch.Tensor]:
    return {shard.key: p.main_grad.clone() for shard, p in named_shards(policy.chunks, policy.config.model)}


def weights(policy: Policy) -> dict[tuple, torch.Tensor]:
    return {shard.key: p.detach().clone() for shard, p in named_shards(policy.chunks, policy.config.model)}


def worst_relative_error(actual: dict, expected: dict) -> float:
    """Largest ||difference|| / ||expected|| over tensors."""
    assert actual.keys() == expected.keys()
    return max(float((actual[key] - expected[key]).norm() / expected[key].norm()) for key in expected)
