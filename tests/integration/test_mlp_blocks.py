"""The MLP of a prompt chunk in blocks of rows: the same numbers, and nothing as wide as the MLP that is as long as the
chunk."""
import numpy as np
import pytest
import torch
from allocation_tracker import AllocationTracker

from megatron_longstraw.mcore.calls import capture, prefix_backward, replay
from megatron_longstraw.mcore.packing import PromptBatch
from tests.helpers import gradients, random_groups, tiny_policy, worst_relative_error
from tests.tracking import Tracker

CHUNK, BLOCK, HIDDEN, FFN = 128, 16, 32, 512
OPTIONS = dict(num_layers=3, ffn_hidden_size=FFN, prefix_chunk_tokens=CHUNK)
MOE = dict(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=48)
BLOCKS = dict(prefix_mlp_block_tokens=BLOCK)


def step(policy):
    """K of all layers after capture, and the gradients."""
    batch = PromptBatch(random_groups(1, 2 * CHUNK + 41, [8, 5]))
    weights = {(0, index): np.ones(length, np.float32) for index, length in enumerate((8, 5))}
    policy.zero_grad()
    store = capture(policy, batch)
    keys = {number: torch.cat([block.k for block in state.blocks(2 * CHUNK + 40)], dim=2) for number, state in store.layers.items()}
    replay(policy, store, batch, weights)
    prefix_backward(policy, store, batch)
    store.release()
    return keys, gradients(policy)


@pytest.mark.parametrize("options", [{}, MOE, dict(recompute_granularity="full")], ids=lambda options: " ".join(options))
def test_the_numbers_are_those_of_whole_chunks(options):
    """To rounding: a matrix product of fewer rows may add in another order."""
    keys, grads = step(tiny_policy(**OPTIONS | options))
    keys_in_blocks, grads_in_blocks = step(tiny_policy(**OPTIONS | options | BLOCKS))
    assert worst_relative_error(keys_in_blocks, keys) < 1e-6
    assert worst_relative_error(grads_in_blocks, grads) < 2e-6


def wide_rows(policy) -> int:
    """Most rows of any tensor of a prompt's passes that is as wide as the MLP."""
    batch = PromptBatch(random_groups(1, 2 * CHUNK + 41, []))
    with Tracker() as tracker:
        prefix_backward(policy, capture(policy, batch), batch)
    return max(shape[0] for _, shape in tracker.allocated if len(shape) == 3 and shape[2] in (FFN, 2 * FFN))


def test_no_intermediate_of_the_mlp_is_as_long_as_the_chunk():
    assert wide_rows(tiny_policy(**OPTIONS)) == CHUNK
    assert wide_rows(tiny_policy(**OPTIONS | BLOCKS)) == BLOCK


def test_peak_bytes_fall_by_what_the_mlp_took():
    """Two layers keep gate and up, their activation and its product: four tensors as wide as the MLP; at least those of
    all but one block are gone."""
    peaks = []
    for options in ({}, BLOCKS):
        policy = tiny_policy(**OPTIONS | options)
        batch = PromptBatch(random_groups(1, 2 * CHUNK + 41, []))
        with AllocationTracker() as tracker:
            prefix_backward(policy, capture(policy, batch), batch)
        peaks.append(tracker.peak_bytes)
    assert peaks[0] - peaks[1] > 2 * 4 * FFN * (CHUNK - BLOCK) * 4
