"""Whole steps on several ranks with the prefix state in host memory."""
import numpy as np
import pytest
import torch

from megatron_longstraw.mcore.calls import capture, prefix_backward, replay
from megatron_longstraw.mcore.packing import PromptBatch
from tests.helpers import gradients, random_groups, tiny_policy

from .launch import run_ranks

HOST = dict(prefix_kv_tier="host", prefix_out_tier="host")
LAYOUTS = {
    "cp2": dict(context_parallel_size=2),
    "cp2, fp8": dict(context_parallel_size=2, prefix_kv_dtype="fp8"),
    "pp2, bf16, recompute": dict(pipeline_model_parallel_size=2, bf16=True, recompute_granularity="full"),
    "pp2, fp8, bf16 gradients": dict(
        pipeline_model_parallel_size=2, bf16=True, prefix_kv_dtype="fp8", prefix_grad_dtype="bf16"
    ),
}


def step(**options):
    """Log-probs by branch and gradients by shard of one step, and what its store held."""
    policy = tiny_policy(prefix_block_tokens=20, **options)
    batch = PromptBatch(random_groups(2, 110, [5, 8, 1]))
    store = capture(policy, batch)
    places = [(prompt, index) for prompt in range(2) for index in range(3)]
    rng = np.random.default_rng(3)
    weights = {place: rng.standard_normal(8).astype(np.float32)[: [5, 8, 1][place[1]]] for place in places}
    policy.zero_grad()
    logprobs, _ = replay(policy, store, batch, weights)
    held = store.nbytes
    prefix_backward(policy, store, batch)
    policy.finalize_gradients()
    return logprobs, gradients(policy), held


def both_places(rank):
    return {name: (step(**options), step(**options, **HOST)) for name, options in LAYOUTS.items()}


@pytest.mark.dist
@pytest.mark.timeout(200)
def test_host_memory_changes_no_bit_of_a_step():
    for of_rank in run_ranks(both_places, 2, timeout_s=150.0):
        for name, ((logprobs, grads, held), (host_logprobs, host_grads, host_held)) in of_rank.items():
            assert logprobs.keys() == host_logprobs.keys()
            assert all(np.array_equal(logprobs[place], host_logprobs[place]) for place in logprobs), name
            assert all(torch.equal(grads[key], host_grads[key]) for key in grads), name
            assert (held.host, host_held.device) == (0, 0) and held.device == host_held.host > 0, name
