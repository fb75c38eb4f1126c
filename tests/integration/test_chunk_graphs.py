"""Autograd graphs of a prompt's last chunks, kept from capture to the walk back: one forward less, the same gradient."""
import numpy as np
import pytest
import torch
from allocation_tracker import AllocationTracker

from megatron_longstraw.mcore.calls import capture, prefix_backward, replay
from megatron_longstraw.mcore.packing import PromptBatch
from megatron_longstraw.prefix.store import StaleStoreError
from tests.helpers import gradients, random_groups, tiny_policy
from tests.tracking import Tracker

LAYERS, CHUNK, CHUNKS = 3, 32, 5
OPTIONS = dict(num_layers=LAYERS, prefix_out_tier="none")
LENGTHS = [8, 5]
PLENTY = 2**30


def prompt_batch(last_chunk=CHUNK):
    return PromptBatch(random_groups(1, CHUNK * (CHUNKS - 1) + last_chunk + 1, LENGTHS))


def step(policy, batch=None):
    """(gradients, attention forwards of capture, of replay and walk back)"""
    batch = batch or prompt_batch()
    policy.meter.reset()
    policy.zero_grad()
    with Tracker() as tracker:
        store = capture(policy, batch)
        captured = tracker.attention_forwards
        replay(policy, store, batch, {(0, index): np.ones(length, np.float32) for index, length in enumerate(LENGTHS)})
        prefix_backward(policy, store, batch)
    store.release()
    return gradients(policy), captured, tracker.attention_forwards - captured


def graph_bytes(**options):
    """Of one chunk, as the policy counts them."""
    store = capture(tiny_policy(**OPTIONS | options, prefix_graph_bytes=PLENTY), prompt_batch())
    assert store.graphs.nbytes % CHUNKS == 0, "chunks of one length have graphs of one size"
    return store.graphs.nbytes // CHUNKS


@pytest.mark.parametrize("kept", [0, 1, 2, CHUNKS])
def test_kept_chunks_run_once(kept):
    """A chunk's attention: itself, and from the second on one block of the store; in all layers but the last."""
    policy = tiny_policy(**OPTIONS, prefix_graph_bytes=kept * graph_bytes() + 1)
    grads, captured, later = step(policy)
    expected, _, later_without = step(tiny_policy(**OPTIONS))
    assert all(torch.equal(grads[key], expected[key]) for key in expected)
    attention = [(LAYERS - 1) * (1 if index == 0 else 2) for index in range(CHUNKS)]
    assert captured == sum(attention)
    assert later_without - later == sum(attention[CHUNKS - kept :])
    assert policy.meter.tokens("capture") == CHUNK * CHUNKS
    assert policy.meter.tokens("prefix_backward") == CHUNK * (CHUNKS - kept)


@pytest.mark.parametrize(
    "options",
    [
        dict(prefix_out_tier="device"),
        dict(recompute_granularity="full"),
        dict(recompute_granularity="full", prefix_out_tier="device"),
        dict(prefix_grad="last:2"),
        dict(prefix_mlp_block_tokens=7),
        dict(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24),
        dict(prefix_graph_bytes=PLENTY // 2**12),
    ],
    ids=str,
)
def test_gradients_stay_the_same(options):
    batch = prompt_batch(last_chunk=11)
    with_graphs = tiny_policy(**OPTIONS | dict(prefix_graph_bytes=PLENTY) | options)
    grads, *_ = step(with_graphs, batch)
    expected, *_ = step(tiny_policy(**OPTIONS | options | dict(prefix_graph_bytes=0)), batch)
    assert all(torch.equal(grads[key], expected[key]) for key in expected)
    assert with_graphs.meter.tokens("prefix_backward") <= 4 * CHUNK


@pytest.mark.parametrize("options", [{}, dict(recompute_granularity="full"), dict(prefix_mlp_block_tokens=7)], ids=str)
def test_counted_bytes_are_those_held(options):
    """What the operations keep for backward is what stays allocated."""
    held = []
    for num_bytes in (0, PLENTY):
        policy, batch = tiny_policy(**OPTIONS | options, prefix_graph_bytes=num_bytes), prompt_batch()
        with AllocationTracker() as tracker:
            store = capture(policy, batch)
        held.append(tracker.live_bytes)
    assert store.graphs.nbytes <= held[1] - held[0] <= 1.05 * store.graphs.nbytes


def test_the_budget_is_one_for_all_stores():
    one = graph_bytes()
    policy = tiny_policy(**OPTIONS, prefix_graph_bytes=3 * one)
    first = capture(policy, prompt_batch())
    second = capture(policy, prompt_batch())
    assert (first.graphs.nbytes, second.graphs.nbytes) == (3 * one, 0)
    first.release()
    assert first.nbytes.total == 0
    third = capture(policy, prompt_batch())
    assert third.graphs.nbytes == 3 * one
    prefix_backward(policy, third, prompt_batch())
    assert third.graphs.nbytes == 0 and capture(policy, prompt_batch()).graphs.nbytes == 3 * one


def test_released_graphs_are_freed():
    policy = tiny_policy(**OPTIONS, prefix_graph_bytes=PLENTY)
    with AllocationTracker() as tracker:
        store = capture(policy, prompt_batch())
        assert tracker.live_bytes > store.graphs.nbytes > 0
        store.release()
    assert tracker.live_bytes < 0.01 * tracker.peak_bytes


def test_graphs_of_other_weights_are_not_walked():
    policy = tiny_policy(**OPTIONS, prefix_graph_bytes=PLENTY)
    store = capture(policy, prompt_batch())
    policy.weights_changed()
    with pytest.raises(StaleStoreError):
        prefix_backward(policy, store, prompt_batch())


def test_a_capture_for_sampling_keeps_none():
    policy = tiny_policy(**OPTIONS, prefix_graph_bytes=PLENTY)
    assert capture(policy, prompt_batch(), walk_back=False).graphs is None
