"""The planner's estimate of activations against the tensors that a step allocates."""
import numpy as np
import pytest

from allocation_tracker import AllocationTracker
from megatron_longstraw.mcore.calls import capture, prefix_backward, replay
from megatron_longstraw.mcore.packing import PromptBatch
from megatron_longstraw.planner.bytes import bytes_of_rank
from tests.helpers import random_groups, tiny_policy

BASE = dict(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=512,
    vocab_size=2000,
    prefix_chunk_tokens=256,
    max_prompt_length=1025,
    max_response_length=16,
)


@pytest.mark.parametrize(
    "options",
    [{}, dict(recompute_granularity="full", bf16=True), dict(prefix_grad="frozen"), dict(max_response_length=128)],
    ids=lambda options: " ".join(options),
)
def test_the_estimate_is_near_what_a_step_allocates(options):
    policy = tiny_policy(**BASE | options)
    rollout = policy.config.rollout
    lengths = [rollout.max_response_length] * rollout.group_size
    batch = PromptBatch(random_groups(1, rollout.max_prompt_length, lengths))
    weights = {(0, index): np.ones(length, np.float32) for index, length in enumerate(lengths)}
    with AllocationTracker() as tracker:
        store = capture(policy, batch)
        replay(policy, store, batch, weights)
        prefix_backward(policy, store, batch)
        store.release()
    planned = bytes_of_rank(policy.config, 1)
    state = planned.prefix_kv + planned.prefix_attention + planned.prefix_grad
    assert 0.75 < (state + planned.activations) / tracker.peak_bytes < 1.25
