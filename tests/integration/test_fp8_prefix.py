"""FP8 in the prompt passes: what runs in it, what does not, and that a chunk that runs again gives the same numbers."""
import contextlib
from functools import partial, partialmethod

import pytest
import torch

from megatron_longstraw.config import ConfigError, load_config
from megatron_longstraw.mcore import fp8, fp8_linear, parallel
from megatron_longstraw.mcore.core_attention import BranchCoreAttention
from megatron_longstraw.mcore.calls import capture, prefix_backward, replay, score
from megatron_longstraw.mcore.fp8 import PrefixFp8
from megatron_longstraw.mcore.packing import PromptBatch
from megatron_longstraw.prefix.microbatch import MicroBatch
from tests.helpers import gradients, random_groups, tiny_policy, worst_relative_error
from tests.integration.test_run_metrics import run

RECIPES = ["tensorwise", "blockwise"]
MOE = dict(num_experts=4, moe_ffn_hidden_size=32)


def batch_of(prompt_tokens=70, response_tokens=(5, 8)):
    return PromptBatch(random_groups(1, prompt_tokens, list(response_tokens)))


def keys_and_values(body):
    """What every layer's attention is given while `body` runs, by (layer, chunk), in the order of the forwards."""
    seen = {}

    def record(real, module, *args, **given):
        mb = next(fact for fact in args if isinstance(fact, MicroBatch))
        if mb.chunk_index is not None:
            keys_values = args[1:3] if real.__name__ == "_attend" else args[:2]
            rows = slice(mb.valid_local_tokens)
            parts = tuple(x[rows].detach().clone() for x in keys_values)
            seen.setdefault((module.layer_number, mb.chunk_index), []).append(parts)
        return real(module, *args, **given)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_attend", "store_only"):  # the last layer attends to nothing
            real = getattr(BranchCoreAttention, name)
            patch.setattr(BranchCoreAttention, name, partialmethod(partial(record, real)))
        body()
    return seen


def step(policy, batch, weight=0.1):
    policy.zero_grad()
    store = capture(policy, batch)
    weights = {(0, i): weight * torch.ones(b.num_tokens).numpy() for i, b in enumerate(batch.groups[0].branches)}
    logprobs, _ = replay(policy, store, batch, weights)
    prefix_backward(policy, store, batch)
    policy.finalize_gradients()
    return logprobs, gradients(policy)


def recomputed_differently(policy, batch):
    """How many of the keys and values of the walk back are not those of capture, to the last bit."""
    seen = keys_and_values(lambda: step(policy, batch))
    assert len(seen) == 2 * 3 and all(len(forwards) > 1 for forwards in seen.values())
    pairs = [pair for first, *later in seen.values() for again in later for pair in zip(first, again)]
    return sum(not torch.equal(stored, again) for stored, again in pairs)


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"recompute_granularity": "full"}, MOE], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_chunks_that_run_again_give_the_stored_keys_and_values(recipe, options, monkeypatch):
    """The gradient that replay left in the store belongs to these K, V and no others."""
    policy = tiny_policy(fp8_prefix=recipe, **options)
    assert recomputed_differently(policy, batch_of()) == 0
    real, calls = policy.prefix_precision, iter(range(2))
    monkeypatch.setattr(policy, "prefix_precision", lambda: real() if next(calls) == 0 else contextlib.nullcontext())
    assert recomputed_differently(policy, batch_of()) > 0, "the comparison has teeth: capture alone in FP8"


@pytest.mark.parametrize("options", [{}, {"bf16": True}, MOE], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gradient_is_near_that_without_fp8(recipe, options):
    batch = batch_of()
    plain, rounded = tiny_policy(**options), tiny_policy(fp8_prefix=recipe, **options)
    (logprobs, truth), (rough, actual) = step(plain, batch), step(rounded, batch)
    assert 1e-4 < max(abs(rough[0, i] - logprobs[0, i]).max() for i in range(2)) < 0.25
    assert actual.keys() == truth.keys()
    a, b = (torch.cat([grads[key].flatten() for key in truth]) for grads in (actual, truth))
    assert 1e-3 < float((a - b).norm() / b.norm()) < 0.2


def test_torch_gives_the_numbers_that_are_emulated():
    batch = batch_of(35, (3,))
    (logprobs, actual), (emulated, expected) = (
        step(tiny_policy(fp8_prefix="tensorwise", fp8_backend=name, num_layers=1), batch) for name in ("torch", "emulated")
    )
    assert abs(logprobs[0, 0] - emulated[0, 0]).max() < 1e-4
    assert worst_relative_error(actual, expected) < 1e-2  # a sum in another order can round to the next FP8 number


@pytest.mark.parametrize("backend", ["emulated", "torch"])
def test_only_prompt_passes_are_in_fp8(backend):
    """Score of one and the same store is the same to the last bit with and without the option."""
    batch = batch_of(35, (4,))
    rounded, plain = tiny_policy(fp8_prefix="tensorwise", fp8_backend=backend, num_layers=1), tiny_policy(num_layers=1)
    store = capture(rounded, batch)
    assert (score(rounded, store, batch)[0][0, 0] == score(plain, store, batch)[0][0, 0]).all()
    assert (score(plain, capture(plain, batch), batch)[0][0, 0] != score(plain, store, batch)[0][0, 0]).any()


def test_nothing_stays_switched_on_after_an_error():
    policy = tiny_policy(fp8_prefix="tensorwise")
    before = {name: vars(module).copy() for name, module in policy.chunks[0].named_modules()}
    with pytest.raises(ZeroDivisionError), policy.prefix_precision():
        changed = {name for name, module in policy.chunks[0].named_modules() if vars(module) != before[name]}
        linears = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
        assert {name.rpartition(".")[2] for name in changed} == linears
        assert len(changed) == 2 * 4 and all(name.startswith("decoder.layers.") for name in changed)
        raise ZeroDivisionError
    assert {name: vars(module) for name, module in policy.chunks[0].named_modules()} == before


@pytest.mark.parametrize(("recipe", "number_format"), [("tensorwise", "hybrid"), ("blockwise", "e4m3")])
def test_transformer_engine_is_switched_on_for_the_call_only(recipe, number_format):
    policy = tiny_policy()
    config = policy.megatron_config
    before = config.fp8, config.fp8_recipe
    with pytest.raises(ZeroDivisionError), PrefixFp8(recipe, "te").switched_on(policy.chunks):
        assert (config.fp8, config.fp8_recipe) == (number_format, recipe)
        raise ZeroDivisionError
    assert (config.fp8, config.fp8_recipe) == before == (None, "delayed")


def test_an_expert_without_tokens():
    """Three tokens on two of four experts each: some have nothing to quantize."""
    batch = batch_of(4, (3,))
    logprobs, grads = step(tiny_policy(fp8_prefix="blockwise", moe_router_topk=1, **MOE), batch)
    assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize(
    ("recipe", "backend", "tp", "sequence_parallel", "rows"),
    [
        ("tensorwise", "emulated", 24, True, 24),
        ("tensorwise", "torch", 24, True, 48),  # L02: the larger of 24 and 16 is a multiple of 24 only
        ("tensorwise", "torch", 24, False, 16),
        ("tensorwise", "te", 24, True, 384),  # the share of each of the 24 is quantized by itself
        ("blockwise", "te", 2, True, 256),
        ("blockwise", "te", 2, False, 16),
    ],
)
def test_rows_are_a_multiple_of_all_that_is_asked(recipe, backend, tp, sequence_parallel, rows):
    layout = parallel.Layout(
        groups=None, cell=None, device=torch.device("cpu"), tp_rank=0, tp_size=tp, pp_rank=0, pp_size=1, cp_rank=0,
        cp_size=2, dp_rank=0, dp_size=1, ep_size=1, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    assert PrefixFp8(recipe, backend).row_multiple(layout) == rows


def test_pads_carry_nothing(monkeypatch):
    """69 prompt tokens in chunks of 32, 32 and 5; the last is padded to 16 rows where a kernel wants that."""
    batch, policy = batch_of(), tiny_policy(fp8_prefix="blockwise")
    logprobs, grads = step(policy, batch)
    monkeypatch.setitem(fp8.ALIGNMENT_TOKENS, "emulated", 16)
    store = capture(policy, batch)
    assert [chunk.local_tokens for chunk in store.plan.chunks] == [32, 32, 16] and store.local_tokens == 69
    padded, padded_grads = step(policy, batch)
    assert all((padded[place] == logprobs[place]).all() for place in logprobs)
    # A pad's input shares a scale with its chunk's in the weight gradient, so rounding differs there, a little.
    assert worst_relative_error(padded_grads, grads) < 2e-2


def test_a_run_says_and_records_what_it_runs(tmp_path, capsys):
    """Where `auto` left it open, the recorded configuration says what it came to."""
    run(tmp_path / "off")
    run(tmp_path / "on", fp8_prefix="blockwise")
    off, on = (line for line in capsys.readouterr().out.splitlines() if line.startswith("layout"))
    assert off == "layout     1 rank on cpu, prefix gradient exact"
    assert on == f"{off}, prompt passes in FP8 (blockwise, emulated)"
    recorded = [load_config([tmp_path / name / "config.toml"]).prefix.fp8_backend for name in ("off", "on")]
    assert recorded == ["auto", "emulated"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(fp8_backend="te", prefix_mlp_block_tokens=16), "run --prefix-mlp-block-tokens 16 again without FP8"),
        (dict(fp8_backend="te"), "--fp8-prefix blockwise with --fp8-backend te needs Transformer Engine's layers"),
        (dict(fp8_backend="torch"), "torch runs tensorwise only; change --fp8-prefix or --fp8-backend"),
    ],
)
def test_what_is_not_there_is_refused(options, message):
    """Without Transformer Engine Megatron's own context does nothing, silently."""
    with pytest.raises(ConfigError, match=message):
        tiny_policy(fp8_prefix="blockwise", **options)


def no_kernel(*_):
    raise RuntimeError("no kernel image\nsecond line")


def wrong(a, b, dtype):
    return torch.zeros(a.values.shape[0], b.values.shape[0], dtype=dtype)


def not_quantized(matrix, dtype, block):
    return fp8_linear.Quantized(matrix, torch.ones(1, 1), None)


@pytest.mark.parametrize(
    ("product", "message"),
    [
        (no_kernel, r"does not run on this device \(no kernel image\)"),
        (wrong, "trial products are off by 1.0e.00, 1.0e.00, 1.0e.00"),
    ],
)
def test_a_device_that_cannot_is_refused(product, message, monkeypatch):
    monkeypatch.setitem(fp8.PRODUCTS, "emulated", product)
    with pytest.raises(ConfigError, match=message):
        tiny_policy(fp8_prefix="tensorwise")


def test_what_is_not_fp8_is_refused(monkeypatch):
    """A run in the model's own dtype under the name of FP8."""
    monkeypatch.setattr(fp8_linear, "quantize", not_quantized)
    with pytest.raises(ConfigError, match=r"off by 0.0e.00, .* need errors of FP8"):
        tiny_policy(fp8_prefix="tensorwise")
