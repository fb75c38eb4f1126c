"""The plan's text, and what of the bytes needs no model to be checked against."""
import pytest

from megatron_longstraw.config import load_config
from megatron_longstraw.planner.bytes import bytes_of_rank
from megatron_longstraw.planner.plan import plan

BASE = dict(num_layers=2, hidden_size=64, vocab_size=100, max_prompt_length=1001, prefix_chunk_tokens=100)


def planned(world_size=1, **options):
    return bytes_of_rank(load_config(overrides=BASE | options), world_size)


@pytest.mark.parametrize(
    ("options", "world_size", "captures"),
    [
        (dict(), 1, 1),
        (dict(train_batch_size=6), 1, 6),
        (dict(train_batch_size=6), 4, 2),
        (dict(train_batch_size=6, prompts_per_microbatch=4), 1, 2),
        (dict(train_batch_size=6, ppo_mini_batch_size=3), 1, 3),
        (dict(train_batch_size=6, prefix_state_budget=0), 1, 1),
        (dict(train_batch_size=6, prefix_state_budget=4_000_000), 1, 4),
    ],
)
def test_captures_held_at_once(options, world_size, captures):
    """A capture of 1,000 tokens is 2 layers of K, V and one of out of 64 channels with 4 lse, float32: 1.30 MB."""
    assert planned(world_size, **options).captures == captures


def test_more_captures_take_more_but_one_gradient():
    one, six = planned(), planned(train_batch_size=6)
    assert six.total - one.total == 5 * (one.prefix_kv + one.prefix_attention)
    assert planned(train_batch_size=6, prefix_state_budget=0).total == one.total


def test_schedule_full_keeps_no_prefix():
    full = planned(schedule="full")
    assert (full.prefix_kv, full.prefix_attention, full.prefix_grad) == (0, 0, 0)
    assert full.activations > planned().activations


def test_plan_of_host_memory():
    """K, V of two layers fit, 1,000 tokens x 2 x 64 channels in float32 each, and dK, dV of one."""
    options = dict(prefix_kv_tier="host", prefix_device_bytes="1.5M", prefix_out_tier="host", train_batch_size=3)
    device, host = planned(train_batch_size=3), planned(**options)
    layer = 1000 * 2 * 64 * 4
    assert (host.prefix_kv, host.prefix_grad, host.prefix_attention) == (2 * layer, layer, 0)
    assert (host.host_capture, host.host_grad) == (device.prefix_attention, layer)
    stored_here, stored_there = (x.total - x.fullest.num_bytes + x.prefix_grad for x in (device, host))
    assert host.host + stored_there == stored_here
    assert host.total < device.total
    assert host.captures == device.captures == 3
    text = plan(load_config(overrides=BASE | options), 1)
    assert f"in host memory {host.host:>21,}" in text and "in host memory" not in plan(load_config(overrides=BASE), 1)
    assert planned(prefix_kv_tier="host").prefix_kv == 0


def test_plan_of_a_pipeline_names_the_fullest_stage():
    options = BASE | dict(pipeline_model_parallel_size=2, vocab_size=5000)
    smaller = options | dict(vocab_size=100, max_prompt_length=10001)
    assert "(pipeline stage 0)" in plan(load_config(overrides=smaller), 4), "the last layer keeps no attention"
    text = plan(load_config(overrides=options | dict(prefix_grad="frozen")), 4)
    lines = text.splitlines()
    assert lines[0] == "layout     pp2 x dp2 on 4 ranks"
    assert "vocabulary 5,000, padded 5,120" in lines[1]
    assert "of the fullest rank (pipeline stage 1)" in text, "it holds the final norm and a copy of the embedding"
    assert lines[-1] == "timeouts   10 minutes in every group: world (4), pipeline (2), data (2), replica (2)"


def test_plan_counts_tokens():
    text = plan(load_config(overrides=BASE | dict(train_batch_size=3, group_size=4, max_response_length=5)), 1)
    assert "3 prompts x 4 responses a step: at most 3,003 of prompts and 60 of responses" in text
    assert "longest prompt 1,001 in 10 chunks of 100 (1,001 a rank), longest response 5" in text


def test_plan_without_a_longest_prompt_counts_by_token():
    """2 layers x K, V of 64 channels as float32, twice with dK, dV; and one of out of 64 channels with 4 lse."""
    text = plan(load_config(overrides=BASE | dict(max_prompt_length=None)), 1)
    assert f"and {4 * (2 * 2 * 2 * 64 + 64 + 4):,} for each prompt token" in text
