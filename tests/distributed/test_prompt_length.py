"""Nothing but the prefix state grows with the prompt: no single allocation, and not all of them together.

What a rank holds for a prompt of a million tokens is the prompt's K, V (with what is kept and collected beside them)
and what one chunk or one pack of responses takes: attention's temporaries, rotary phases, token ids and tables too.
"""
import functools

import numpy as np
import pytest

from megatron_longstraw.mcore.calls import capture, prefix_backward, replay, score
from megatron_longstraw.mcore.packing import PromptBatch
from megatron_longstraw.rollout.generate import generate
from tests.allocation_events import AllocationEvents
from tests.helpers import random_groups, tiny_policy

from .launch import run_ranks

CHUNK = 32
CHUNKS = (4, 16)
CASES = {
    1: {
        "default": {},
        "full recompute": dict(recompute_granularity="full"),
        "MLP in blocks": dict(prefix_mlp_block_tokens=8),
        "graph of one chunk": dict(prefix_graph_bytes=250_000),
        "experts, all of them": dict(num_experts=4, moe_router_topk=4, moe_ffn_hidden_size=24),
        "fp8 in host memory": dict(prefix_kv_dtype="fp8", prefix_kv_tier="host", prefix_out_tier="host"),
        "yarn": dict(position_embedding_type="yarn", yarn_original_max_position_embeddings=64),
    },
    2: {"context parallel": dict(context_parallel_size=2)},
}


def step(num_chunks: int, **options) -> AllocationEvents:
    """Capture, sampling, score, replay and walk back of one prompt of that many whole chunks."""
    policy = tiny_policy(**options, prefix_chunk_tokens=CHUNK, prefix_block_tokens=CHUNK, max_response_length=6)
    batch = PromptBatch(random_groups(1, num_chunks * CHUNK + 1, []))
    with AllocationEvents() as events:
        events.begin("capture")
        store = capture(policy, batch)
        events.mark_state(store)
        events.begin("sampling")
        generate(policy, store, batch, step=0)
        lengths = [branch.num_tokens for branch in batch.groups[0].branches]
        events.begin("score")
        score(policy, store, batch)
        events.begin("replay")
        replay(policy, store, batch, {(0, index): np.ones(length, np.float32) for index, length in enumerate(lengths)})
        events.mark_state(store)
        events.begin("walk back")
        prefix_backward(policy, store, batch)
    return events


def measure(rank: int, cases: dict[str, dict]) -> dict[str, list[tuple[dict[str, int], dict[str, int]]]]:
    """By case, for each prompt length: the largest allocations and the peaks, the state's left out."""
    results = {}
    for name, options in cases.items():
        steps = [step(num_chunks, **options) for num_chunks in CHUNKS]
        results[name] = [(events.largest_outside(), events.peaks_outside()) for events in steps]
    return results


@functools.cache
def ranks_of(world_size: int) -> list:
    return run_ranks(measure, world_size, CASES[world_size])


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world_size", "name"), [pytest.param(size, name, id=name) for size, cases in CASES.items() for name in cases]
)
def test_only_the_prefix_state_grows_with_the_prompt(world_size, name):
    for results in ranks_of(world_size):
        (few, peaks_of_few), (many, peaks_of_many) = results[name]
        assert few and many == few, "an allocation grew, or an operator came with the length"
        assert all(0 < peaks_of_many[call] <= peak for call, peak in peaks_of_few.items()), (peaks_of_few, peaks_of_many)
