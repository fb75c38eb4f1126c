"""What the planner says of runs that cannot be had here: published numbers, limits, and how costs grow."""
import dataclasses
import json
import math
from collections import Counter

import pytest

from megatron_longstraw.config import ConfigError, load_config, validate
from megatron_longstraw.launch import start
from megatron_longstraw.planner.__main__ import main, parse
from megatron_longstraw.planner.bytes import GIB, bytes_of_shape, fullest_stage
from megatron_longstraw.planner.hardware import CALIBRATED, CALIBRATED_FACTS, HARDWARE, Curve, hardware_of
from megatron_longstraw.planner.parameters import total_parameters
from megatron_longstraw.planner.seconds import step_seconds
from megatron_longstraw.planner.shape import PLANNED_MODELS, shape_of
from megatron_longstraw.planner.solve import (
    GRAIN_TOKENS,
    all_context_parallel,
    best_layouts,
    fewest_gpus,
    fits,
    gains,
    largest_group,
    longest_context,
    unbounded,
)

H20 = HARDWARE["h20-96"]
EIGHT_B = dict(
    num_layers=36,
    hidden_size=4096,
    ffn_hidden_size=12288,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=151936,
    qk_layernorm=True,
    untie_embeddings_and_output_weights=True,
    bf16=True,
    recompute_granularity="full",
    prefix_chunk_tokens=16384,
    branches_per_microbatch=2,
    max_prompt_length=2**20 - 8192,
    max_response_length=8192,
)


def shape(world_size=8, *, own=None, **options):
    defaults = EIGHT_B | (dict(tensor_model_parallel_size=8, sequence_parallel=True) if world_size == 8 else {})
    config = load_config(overrides=defaults | options)
    assert validate(config, world_size) == []
    return shape_of(config, world_size).changed(**(own or {}))


def hybrid(prompt_tokens):
    """Qwen3.6-27B with all 8 ranks in context parallelism."""
    model, linear = PLANNED_MODELS["qwen3.6-27b"]
    options = dict(context_parallel_size=8, prefix_chunk_tokens=4096, prefix_grad="frozen")
    config = load_config(overrides=options | dict(max_prompt_length=prompt_tokens + 1))
    return shape_of(dataclasses.replace(config, model=model), 8).changed(linear=linear)


def test_published_bytes_of_a_hybrid_model():
    """16 of 64 layers with 4 KV heads of 256 in bfloat16: 64 KiB a token, 15.94 GiB on each of 8 ranks (LongStraw,
    arXiv 2607.14952). The 48 others hold 146.8 MiB at a boundary, whatever the length."""
    long, short = bytes_of_shape(hybrid(2_088_960)), bytes_of_shape(hybrid(4096))
    assert round(long.prefix_kv / GIB, 2) == 15.94
    assert long.prefix_kv == 2_088_960 // 8 * 64 * 2**10
    assert long.prefix_boundaries == short.prefix_boundaries == pytest.approx(146.8 * 2**20 / 8, rel=1e-3)
    assert round(total_parameters(*PLANNED_MODELS["qwen3.6-27b"]) / 1e9, 1) == 26.9


def test_exact_keeps_a_boundary_for_each_chunk():
    chunks = 2_088_960 // 4096
    frozen, exact = hybrid(2_088_960), hybrid(2_088_960).changed(prefix_grad="exact")
    assert bytes_of_shape(exact).prefix_boundaries == (chunks + 1) * bytes_of_shape(frozen).prefix_boundaries


def test_products_of_long_rows_and_vocabularies_do_not_wrap():
    """16,384 x 151,936 and 12,031 x 248,320 are above 2^31; as int32 the latter would be -1,307,429,376."""
    for rows, vocabulary in ((16384, 151936), (12031, 248320)):
        planned = shape(1, vocab_size=vocabulary, make_vocab_size_divisible_by=1, bf16=False).changed(
            log_probs_chunk_size=rows, prefix_grad="frozen", max_prompt_length=1, max_response_length=16384
        )
        _, found = fullest_stage(planned)
        assert found.fullest.kinds["logits"] >= 2 * 4 * rows * vocabulary > 2**32
    too_many = load_config(overrides=EIGHT_B | dict(log_probs_chunk_size=14135, make_vocab_size_divisible_by=1))
    assert "at most 14134 rows" in "\n".join(validate(too_many, 1))


@pytest.mark.parametrize(("fp8", "multiple"), [("off", 24), ("blockwise", 48)])
def test_multiples_of_rows_are_combined(fp8, multiple):
    """The larger of 24 and 16 satisfies only one of them."""
    found = shape_of(load_config(overrides=dict(tensor_model_parallel_size=24, sequence_parallel=True)), 24)
    found = found.changed(fp8_prefix=fp8)
    assert found.row_multiple == multiple and found.rows(1, found.row_multiple) == multiple


@pytest.mark.parametrize(
    ("own", "field", "share"),
    [
        (dict(kv_dtype="fp8"), "prefix_kv", (1 + 4 / 128) / 2),
        (dict(kv_grad_dtype="bf16"), "prefix_grad", 1 / 2),
        (dict(out_tier="none"), "prefix_attention", 0),
        (dict(optimizer_cpu_offload=True), "optimizer", 0),
    ],
    ids=str,
)
def test_what_takes_less(own, field, share):
    before, after = bytes_of_shape(shape()), bytes_of_shape(shape(own=own))
    assert getattr(after, field) == pytest.approx(share * getattr(before, field))
    assert after.total < before.total


def test_what_leaves_the_device_is_on_the_host():
    here, there = bytes_of_shape(shape()), bytes_of_shape(shape(own=dict(kv_tier="host", out_tier="host")))
    assert there.host == here.prefix_kv + here.prefix_grad + here.prefix_attention
    some = bytes_of_shape(shape(own=dict(kv_tier="host", device_bytes=2**30)))
    assert there.prefix_kv < 0.01 * here.prefix_kv and 0 < some.prefix_kv - there.prefix_kv <= 2**30
    assert bytes_of_shape(shape(own=dict(kv_tier="host", device_bytes=2**40))).host == 0


def test_adapters_train_little_and_responses_alone_need_no_walk_back():
    full = bytes_of_shape(shape())
    adapted = bytes_of_shape(shape(own=dict(adapter_rank=16)))
    assert adapted.weights == full.weights and adapted.adapters < 0.02 * full.weights
    assert adapted.gradients == 2 * adapted.adapters and adapted.prefix_grad == full.prefix_grad
    assert bytes_of_shape(shape(own=dict(adapter_rank=16, adapter_scope="responses"))).prefix_grad == 0
    assert "prefix_backward" not in step_seconds(shape(own=dict(adapter_rank=16, adapter_scope="responses")), H20)


# -- seconds -------------------------------------------------------------------------------------------------


def attention_seconds(planned):
    return {call: cost["attention"] for call, cost in step_seconds(planned, H20).items()}


@pytest.mark.parametrize(("tier", "units"), [("device", 3.5), ("none", 4.5)])
def test_attention_costs_what_the_method_says(tier, units):
    """In forwards of the prompt: exact 3.5 + 7 G R / P, or 4.5 where attention runs again; frozen 1 + 7 G R / P."""
    planned = shape(own=dict(out_tier=tier))
    cost, rollout = attention_seconds(planned), planned.config.rollout
    replayed = 7 * rollout.group_size * rollout.max_response_length / rollout.max_prompt_length
    replayed *= planned.layers / (planned.layers - 1)  # which attend to responses and to the prompt
    forward = cost["capture"]
    assert cost["prefix_backward"] / forward == pytest.approx(units - 1)
    assert cost["replay"] / forward == pytest.approx(replayed, rel=0.01)
    assert "prefix_backward" not in attention_seconds(planned.changed(prefix_grad="frozen"))


def test_twice_the_prompt_costs_four_times_the_attention():
    cost, longer = attention_seconds(shape()), attention_seconds(shape(max_prompt_length=2 * (2**20 - 8192)))
    assert longer["capture"] / cost["capture"] == pytest.approx(4, rel=0.01)
    assert longer["replay"] / cost["replay"] == pytest.approx(2, rel=0.01)


def test_fp8_speeds_the_prompt_up_and_responses_not():
    before, after = (step_seconds(shape(own=dict(fp8_prefix=fp8)), H20) for fp8 in ("off", "tensorwise"))
    for call in ("capture", "prefix_backward"):
        assert after[call]["matmul"] == pytest.approx(before[call]["matmul"] / 2)
    assert after["replay"] == before["replay"]


def test_a_link_that_hides_behind_attention_costs_nothing():
    assert step_seconds(shape(own=dict(kv_tier="host")), H20)["capture"]["host"] == 0
    assert step_seconds(shape(own=dict(optimizer_cpu_offload=True)), H20)["optimizer"]["host"] > 0


def test_seconds_between_measured_points():
    curve = Curve(((10.0, 1.0), (1000.0, 10.0)))
    assert [curve.seconds(amount) for amount in (0, 5, 10, 100, 2000)] == pytest.approx([0, 0.5, 1, math.sqrt(10), 20])


# -- limits --------------------------------------------------------------------------------------------------


def test_the_longest_context_fits_and_a_longer_one_does_not():
    planned = unbounded(shape(own=dict(out_tier="none")))
    longest = longest_context(planned, H20)
    response = planned.config.rollout.max_response_length
    assert fits(planned.changed(max_prompt_length=longest - response), H20)
    assert not fits(planned.changed(max_prompt_length=longest + GRAIN_TOKENS - response), H20)
    assert longest_context(planned, HARDWARE["h20-141"]) > longest
    assert longest_context(unbounded(shape(1)), H20) == 0, "weights, gradients and moments alone are too much"


def test_gains_are_of_valid_choices_and_sorted():
    found = gains(shape(own=dict(out_tier="none")), H20)
    assert found[0] == max(found, key=lambda gain: gain[1]) and all(tokens > 0 for _, tokens in found)
    names = [name for name, _ in found]
    assert "--prefix-grad frozen" in names and "--prefix-grad-dtype bf16" in names
    assert "--tensor-model-parallel-size 16" not in names, "8 key-value heads do not divide by it"


def test_the_best_layout_fits_and_stands_beside_context_parallelism():
    planned = shape(own=dict(out_tier="none"))
    best = best_layouts(planned, H20)
    assert best[0].fits and not best[0].changes_numbers
    assert [c.seconds for c in best if c.fits] == sorted(c.seconds for c in best if c.fits)
    assert all(validate(candidate.shape.config, 8) == [] for candidate in best)
    context = all_context_parallel(planned, H20)
    assert context.shape.cp == 8 and best[0].seconds <= context.seconds


def test_the_largest_group_and_the_fewest_gpus():
    planned = shape(own=dict(out_tier="none"))
    group = largest_group(planned, H20)
    assert fits(planned.changed(group_size=group), H20) and not fits(planned.changed(group_size=group + 1), H20)
    found = fewest_gpus(planned, H20)
    assert found.fits and 1 < found.shape.world_size <= 8


# -- command line --------------------------------------------------------------------------------------------

FLAGS = "--num-layers 2 --bf16 --max-prompt-length 1000 --context-parallel-size 2 --world-size 2".split()


def test_dry_run_and_planner_show_the_same_bytes(capsys):
    assert main(FLAGS) == 0
    planned = capsys.readouterr().out.splitlines()
    dry_run = start("megatron_longstraw.train", [*FLAGS, "--dry-run"], {}).splitlines()
    assert planned[: len(dry_run)] == dry_run and "most at once" in "\n".join(dry_run)


def test_json_holds_bytes_seconds_and_limits(capsys):
    assert main([*FLAGS, "--json", "--hardware", "h100"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["hardware"] == "H100 SXM" and found["longest_context_tokens"] > 10**6
    parts = {"weights", "K, V", "dK, dV", "activations", "communication", "logits", "most at once"}
    assert parts <= set(found["bytes"])
    assert set(found["seconds"]["capture"]) == {"matmul", "attention", "elementwise", "communication", "host", "idle"}


@pytest.mark.parametrize("solve", ["context", "group", "gpus", "layout"])
def test_every_question_has_an_answer_in_words(solve, capsys):
    assert main([*FLAGS, "--solve", solve]) == 0
    assert capsys.readouterr().out


def test_bytes_choose_the_chunk_and_storage_flags_are_planned():
    flags = [*FLAGS, "--prefix-activation-bytes", "4M", "--prefix-kv-dtype", "fp8", "--prefix-kv-tier", "host"]
    chosen, _, _ = parse([*flags, "--prefix-device-bytes", "0", "--prefix-grad-dtype", "bf16"])
    assert chosen.config.prefix.prefix_activation_bytes is None
    assert chosen.config.prefix.prefix_chunk_tokens == 128
    assert (chosen.kv_dtype, chosen.kv_grad_dtype, chosen.kv_tier, chosen.device_bytes) == ("fp8", "bf16", "host", 0)


def test_copies_to_the_host_are_of_what_lies_there():
    """Whole layers: with room for K, V of half of them, half of that and all dK, dV pass by."""
    planned = shape(own=dict(kv_tier="host"))
    link = dataclasses.replace(H20, host=Curve.of_rate(1.0))  # so slow that attention hides nothing to speak of
    found = bytes_of_shape(planned)
    half, room = planned.changed(device_bytes=(found.host_capture) // 2), found.host
    everything = step_seconds(planned, link)["capture"]["host"]
    assert everything > 0 and step_seconds(half, link)["capture"]["host"] == pytest.approx(everything / 2, rel=1e-3)
    assert step_seconds(planned.changed(device_bytes=room), link)["replay"]["host"] == 0


@pytest.mark.parametrize(("backend", "share"), [("auto", 1 / 2), ("emulated", 1)])
def test_only_fp8_kernels_are_faster(backend, share):
    seconds = step_seconds(shape(fp8_prefix="tensorwise", fp8_backend=backend), H20)["capture"]["matmul"]
    assert seconds == pytest.approx(share * step_seconds(shape(), H20)["capture"]["matmul"])


def test_the_last_layer_of_a_prompt_pass_is_short():
    """Of one layer alone: no attention, no MLP, nothing kept of it but K, V."""
    one, two = (shape(num_layers=layers) for layers in (1, 2))
    assert bytes_of_shape(one).prefix_attention == 0 < bytes_of_shape(two).prefix_attention
    costs = [step_seconds(planned, H20) for planned in (one, two)]
    for call in ("capture", "prefix_backward"):
        assert costs[0][call]["attention"] == 0 < costs[1][call]["attention"]
        assert costs[0][call]["matmul"] < 0.3 * costs[1][call]["matmul"]
    assert costs[0]["replay"]["attention"] == pytest.approx(costs[1]["replay"]["attention"] / 2)


def test_a_model_that_only_the_planner_knows():
    flags = "--model qwen3.6-27b --adapter-rank 16 --context-parallel-size 8 --world-size 8"
    planned, _, _ = parse(flags.split())
    assert planned.linear.num_layers == 48 and planned.attention_layers == 16 and planned.adapter_rank == 16


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hf-checkpoint", "somewhere"], "got --hf-checkpoint, which the planner does not open"),
        (["--hardware", "cpu"], "got --hardware cpu without --rates"),
        (["--hardware", "cpu", "--rates", "no-such-file"], "got --rates no-such-file"),
        (["--solve", "layout"], "got --solve layout for prompts of any length; need --max-prompt-length"),
        (["--tensor-model-parallel-size", "3"], "tensor_model_parallel_size 3"),
    ],
)
def test_mistakes_are_one_message(flags, message, capsys):
    assert main(flags) == 2
    assert message in capsys.readouterr().err


def test_rates_of_a_calibrated_machine(tmp_path):
    file = tmp_path / "cpu.json"
    curves = dict.fromkeys(CALIBRATED, [[1.0, 2.0], [10.0, 5.0]])
    file.write_text(json.dumps(curves | dict.fromkeys(CALIBRATED_FACTS, 1) | {"corrections": {"replay": {"work": 2.0}}}))
    cpu = hardware_of("cpu", str(file))
    assert cpu.matmul.seconds(1.0) == 2.0
    cost = Counter(matmul=3.0, cp=1.0)
    assert cpu.corrected("score", cost) == cpu.corrected("replay", cost) == Counter(matmul=6.0, cp=2.0)
    assert cpu.corrected("capture", cost) == cost
    file.write_text(json.dumps(dict(matmul=[[1.0, 2.0]])))
    with pytest.raises(ConfigError, match="need a file that tools/calibrate.py wrote"):
        hardware_of("cpu", str(file))
