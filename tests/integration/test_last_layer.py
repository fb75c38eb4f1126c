"""Of a prompt chunk the last layer gives its K, V and nothing else: no attention, no projection, no MLP."""
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_longstraw.mcore.calls import capture, prefix_backward, replay
from megatron_longstraw.mcore.packing import PromptBatch
from tests.helpers import gradients, random_groups, tiny_policy
from tests.tracking import Tracker

LAYERS, HIDDEN, FFN, QKV, HEADS_DIM = 3, 32, 64, 64, 32
"""Of `tests.helpers.TINY` with a layer more; four query heads and two key-value heads of 8 channels."""
CHUNK, CHUNKS = 32, 3
PROMPT_TOKENS = CHUNK * CHUNKS + 1


def step(policy, between=lambda call: None):
    batch = PromptBatch(random_groups(1, PROMPT_TOKENS, [8, 5]))
    weights = {(0, index): np.ones(length, np.float32) for index, length in enumerate((8, 5))}
    policy.zero_grad()
    store = capture(policy, batch)
    between("capture")
    replay(policy, store, batch, weights)
    between("replay")
    prefix_backward(policy, store, batch)
    between("prefix_backward")
    return store


@pytest.mark.parametrize("recompute", [None, "full"])
def test_no_attention_of_the_last_layer(recompute):
    """Each chunk attends once in every other layer: to itself and, from the second on, to one block of the store."""
    policy, counts = tiny_policy(num_layers=LAYERS, recompute_granularity=recompute), {}
    with Tracker() as tracker:
        store = step(policy, lambda call: counts.update({call: tracker.attention_forwards}))
    assert counts["capture"] == (LAYERS - 1) * (2 * CHUNKS - 1)
    assert counts["replay"] - counts["capture"] == LAYERS * 2
    assert counts["prefix_backward"] == counts["replay"], "what capture kept serves the walk back"
    assert sorted(store.layers) == [1, 2, LAYERS], "its K, V are stored like any other's"


def test_matrix_products_of_the_prompt():
    """Capture: every layer but the last whole, its qkv; the walk back as much again and twice that for the gradient."""
    policy, counts = tiny_policy(num_layers=LAYERS), {}
    policy.meter.reset()
    counter = FlopCounterMode(display=False)
    with counter:
        step(policy, lambda call: counts.update({call: counter.get_flop_counts()["Global"][torch.ops.aten.mm]}))
    per_token = 2 * HIDDEN * ((LAYERS - 1) * (QKV + HEADS_DIM + 3 * FFN) + QKV)
    assert counts["capture"] == per_token * CHUNK * CHUNKS
    assert counts["prefix_backward"] - counts["replay"] == 3 * per_token * CHUNK * CHUNKS
    assert policy.meter.tokens("capture") == policy.meter.tokens("prefix_backward") == CHUNK * CHUNKS


def test_the_prompt_gives_no_gradient_to_what_it_left_out():
    policy, grads = tiny_policy(num_layers=LAYERS), {}
    step(policy, lambda call: grads.update({call: gradients(policy)}))
    moved = {key[0] for key, value in grads["replay"].items() if not torch.equal(value, grads["prefix_backward"][key])}
    last = f"decoder.layers.{LAYERS - 1}."
    everything = {key[0] for key in grads["replay"]}
    left_out = {name for name in everything if "final" in name or name.startswith(last) and "qkv" not in name}
    left_out -= {f"{last}input_layernorm.weight"}
    assert moved == everything - left_out
    (key,) = (key for key in grads["replay"] if key[0] == f"{last}self_attention.linear_qkv.weight")
    change = (grads["prefix_backward"][key] - grads["replay"][key]).view(2, -1, 8, HIDDEN)  # two groups of q, q, k, v
    assert change[:, 2:].any() and not change[:, :2].any(), "queries of the last layer are not asked"
