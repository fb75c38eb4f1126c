"""Attention over a stored prefix on one rank: outputs and every gradient against dense float64 autograd.

The identity under test: prompt chunks captured one by one, branches replayed against the stored K, V, and chunks
walked back with the store's gradient as seed, together are plain causal attention of whole sequences.
"""
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

from megatron_longstraw.context_parallel.layout import plan_chunks, slice_sequence
from megatron_longstraw.mcore.core_attention import BranchCoreAttention
from megatron_longstraw.mcore.packed import BranchParams
from megatron_longstraw.prefix.attention import fold, unfold
from megatron_longstraw.prefix.decode import DecodeState, decode_attention
from megatron_longstraw.prefix.microbatch import MicroBatch
from megatron_longstraw.prefix.state import TokenState
from megatron_longstraw.prefix.storage import StoredBytes
from megatron_longstraw.prefix.store import PrefixStore, StaleStoreError
from tests.attention_case import LAYER, AttentionCase, PackageRun, check, run_package, textbook
from tests.oracles.dense_attention import causal, dense_attention
from tests.tolerances import assert_close
from tests.tracking import Tracker

CASES = {
    "one block": AttentionCase(chunk_tokens=64, block_tokens=64, branches=1, packs=(5,)),
    "several chunks and blocks": AttentionCase(),
    "blocks of one token": AttentionCase(prefix_tokens=9, chunk_tokens=4, block_tokens=1),
    "last 1 chunk": AttentionCase(walked_back=1),
    "last 2 chunks, blocks straddle": AttentionCase(walked_back=2, block_tokens=7),
    "frozen": AttentionCase(walked_back=0),
    "two prompts": AttentionCase(num_prompts=2, branches=3),
    "two prompts, last 1 chunk": AttentionCase(num_prompts=2, branches=2, walked_back=1),
    "one kv head": AttentionCase(heads=3, kv_heads=1),
    "as many kv heads": AttentionCase(kv_heads=4),
    "scale": AttentionCase(scale=1.7),
    "no prefix": AttentionCase(prefix_tokens=0),
    "prefix of one token": AttentionCase(prefix_tokens=1, branches=3),
    "last chunk of one token": AttentionCase(prefix_tokens=17),
    "branches of one token": AttentionCase(packs=(1, 1)),
    "padded rows": AttentionCase(multiple=4),
    "padded rows, last 2 chunks": AttentionCase(multiple=4, walked_back=2),
    "kept attention": AttentionCase(keep_attention=True, walked_back=2),
    "forwards first": AttentionCase(forwards_first=True, num_prompts=2),
    "no branch": AttentionCase(packs=()),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_every_gradient(name, dtype):
    """Out, lse, dq, dk, dv of prefix chunks and branches, and what the branches left in the store.

    Fails for a wrong scale, a missing or early seed, a block's lse left out of the merge, pads that are stored, rows
    of one prompt that meet the other prompt's prefix, and gradients sent to tokens that are not walked back."""
    case = replace(CASES[name], dtype=dtype)
    check(case, run_package(case))


@pytest.mark.parametrize("name", ["several chunks and blocks", "two prompts", "last 2 chunks, blocks straddle"])
def test_bfloat16_is_as_good_as_textbook_bfloat16(name):
    """Gradients of the prefix are sums over branches and chunks: kept in bfloat16 they would be far worse."""
    case = replace(CASES[name], dtype=torch.bfloat16, prefix_tokens=70, chunk_tokens=16, branches=6)
    check(case, run_package(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("walked_back", [None, 1])
def test_kept_attention_changes_no_bit(dtype, walked_back):
    """Attention kept at capture replaces the recomputed one: a single differing bit means that it belongs to other
    rows, or was merged in another order, than what the backward recomputes."""
    case = AttentionCase(dtype=dtype, walked_back=walked_back, num_prompts=2, forwards_first=True)
    kept, recomputed = (run_package(replace(case, keep_attention=keep)) for keep in (True, False))
    assert kept.keys() == recomputed.keys()
    for name in kept:
        assert torch.equal(kept[name], recomputed[name]), name


def test_kept_attention_is_used():
    """Otherwise the walk back pays for the attention of every chunk a second time."""
    launches = {}
    for keep in (True, False):
        with Tracker() as tracker:
            run_package(AttentionCase(keep_attention=keep, walked_back=2))
        launches[keep] = tracker.attention_forwards
    # Chunks 1 and 2 see 8 (2 blocks) and 16 stored tokens (8 + 8: 4 blocks, cut where gradients begin) and themselves.
    assert launches[False] - launches[True] == (2 + 1) + (4 + 1)


def test_state_after_the_walk_back_holds_no_attention():
    """(out, lse) of a chunk is freed once its backward is done: otherwise the peak keeps all of them."""
    run = PackageRun(AttentionCase(keep_attention=True, dtype=torch.float32))
    run.run()
    one = 23 * 2 * 8  # tokens * kv heads * head dim of one of K, V, dK, dV
    assert run.state.nbytes == StoredBytes(device=4 * one * 4)


def test_gradient_buffers_cover_what_is_walked_back():
    """last:1 must not pay float32 gradients of the whole prefix: 7 of 23 tokens here."""
    run = PackageRun(AttentionCase(walked_back=1, dtype=torch.float32))
    run.run()
    assert run.state.nbytes == StoredBytes(device=(2 * 23 + 2 * 7) * 2 * 8 * 4)


def test_frozen_keeps_no_gradient_and_no_attention():
    """The cheap mode must not pay for buffers that nobody reads."""
    run = PackageRun(AttentionCase(keep_attention=True, walked_back=0, dtype=torch.float32))
    run.run()
    assert run.state.nbytes == StoredBytes(device=2 * 23 * 2 * 8 * 4)


# -- memory ----------------------------------------------------------------------------------------------------


def _largest_temporary_of_replay(prefix_tokens):
    run = PackageRun(AttentionCase(prefix_tokens=prefix_tokens, chunk_tokens=64, block_tokens=32, dtype=torch.float32))
    run.state.append(0, run.inputs["prefix.k"], run.inputs["prefix.v"])
    last = run.plan.num_chunks - 1

    def replay_and_walk_back():
        run.replay(0)()
        run.walk_back(last)()

    replay_and_walk_back()  # buffers that do have the prefix's length (dK, dV; the results here) exist from now on
    with Tracker() as tracker:
        replay_and_walk_back()
    return tracker.largest_bytes


def test_no_temporary_grows_with_the_prefix():
    """A single tensor of prefix length per layer is what makes a million tokens impossible."""
    short, long = _largest_temporary_of_replay(256), _largest_temporary_of_replay(8 * 256)
    assert 0 < long == short


def test_storage_is_allocated_once_and_pins_nothing():
    """A stored view would keep the chunk's whole fused qkv alive; growing storage would double the peak."""
    state = TokenState(capacity=10, grad_begin=10, block_tokens=4)
    parent = torch.randn(6, 1, 2, 3 * 8)
    for begin, tokens in ((0, 4), (4, 6)):
        state.append(begin, parent[:tokens, ..., :8], parent[:tokens, ..., 8:16])
    blocks = list(state.blocks(10))
    storages = {block.k.untyped_storage().data_ptr() for block in blocks}
    assert len(storages) == 1
    assert blocks[0].k.untyped_storage().nbytes() == 10 * 2 * 8 * 4
    assert state.nbytes == StoredBytes(device=2 * 10 * 2 * 8 * 4)
    state.release()
    assert state.nbytes == StoredBytes()


# -- the state -------------------------------------------------------------------------------------------------


def filled_state(capacity=11, grad_begin=4, block_tokens=3, batch=2):
    state = TokenState(capacity, grad_begin, block_tokens)
    k, v = torch.randn(2, capacity, batch, 2, 8, generator=torch.Generator().manual_seed(3)).unbind(0)
    state.append(0, k, v)
    return state, k, v


@pytest.mark.parametrize("grad_begin", [0, 1, 4, 5, 11])
@pytest.mark.parametrize("block_tokens", [1, 3, 4, 64])
def test_blocks_tile_the_tokens_in_order(grad_begin, block_tokens):
    """Every stored token meets the queries exactly once, in blocks no longer than asked, none of them half in and
    half out of the part whose gradient is collected."""
    state, k, v = filled_state(grad_begin=grad_begin, block_tokens=block_tokens)
    for upto in (0, 1, 4, 7, 11):
        blocks = list(state.blocks(upto))
        assert [i for block in blocks for i in range(block.begin, block.end)] == list(range(upto))
        for block in blocks:
            assert 0 < block.end - block.begin <= block_tokens
            assert {i >= grad_begin for i in range(block.begin, block.end)} == {block.wants_grad}
            assert torch.equal(block.k, k[block.begin : block.end].permute(1, 2, 0, 3))
            assert torch.equal(block.v, v[block.begin : block.end].permute(1, 2, 0, 3))


def test_append_is_idempotent():
    """Activation recompute runs the capture's attention again; nothing may move, double or lose its gradient."""
    state, k, v = filled_state()
    block = list(state.blocks(11))[-1]
    state.add_grad(block, torch.ones_like(block.k), torch.ones_like(block.v))
    nbytes = state.nbytes
    state.append(0, k, v)
    state.append(4, k[4:9], v[4:9])
    stored = torch.cat([block.k for block in state.blocks(11)], dim=2)
    assert torch.equal(stored, k.permute(1, 2, 0, 3))
    assert state.nbytes == nbytes
    assert float(state.take_grad(4, 7)[0].sum()) == block.k.numel()


def test_append_beyond_the_capacity_is_refused():
    """Rows beyond it are pads, or belong to another plan of chunks."""
    state, k, v = filled_state()
    with pytest.raises(AssertionError, match=r"append of tokens 8\.\.13 to a state of 11"):
        state.append(8, k[:5], v[:5])


def test_take_grad_without_a_reader_is_none():
    """Nobody read the state (no branch, or none of these tokens): there is no seed, and no buffer was made."""
    state, _, _ = filled_state()
    nbytes = state.nbytes
    assert state.take_grad(4, 7) is None
    assert state.nbytes == nbytes
    block = next(block for block in state.blocks(11) if block.wants_grad)
    state.add_grad(block, torch.ones_like(block.k), torch.ones_like(block.v))
    assert state.take_grad(4, 0) is None
    assert state.take_grad(4, 7) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_many_readers_are_summed_in_float32(dtype):
    """300 readers of 1.0 each: a bfloat16 sum stops at 256."""
    state = TokenState(capacity=4, grad_begin=1, block_tokens=8)
    rows = torch.zeros(4, 1, 1, 2, dtype=dtype)
    state.append(0, rows, rows)
    block = next(block for block in state.blocks(4) if block.wants_grad)
    for _ in range(300):
        state.add_grad(block, torch.ones_like(block.k), 2 * torch.ones_like(block.v))
    dk, dv = state.take_grad(1, 3)
    assert dk.dtype == dv.dtype == torch.float32
    assert dk.unique().tolist() == [300.0]
    assert dv.unique().tolist() == [600.0]


def test_gradient_lands_on_its_own_tokens():
    """Blocks are addressed by position: shifted by grad_begin or by the block, chunks get each other's seeds."""
    state, _, _ = filled_state(capacity=11, grad_begin=4, block_tokens=3, batch=1)
    for block in state.blocks(11):
        if block.wants_grad:
            marks = torch.arange(block.begin, block.end, dtype=torch.float32)[:, None].expand_as(block.k)
            state.add_grad(block, marks, -marks)
    for begin, tokens in ((4, 7), (4, 2), (6, 3), (10, 1)):
        dk, dv = state.take_grad(begin, tokens)
        assert dk[0, 0, :, 0].tolist() == list(range(begin, begin + tokens))
        assert torch.equal(dv, -dk)


def test_a_store_knows_its_weights():
    """State of other weights would mix two models into one gradient without any error."""
    plan = plan_chunks(9, 4, cp_rank=0, cp_size=1)
    store = PrefixStore(1, plan, num_chunks_walked_back=1, weights_version=3, block_tokens=4, keep_attention=True)
    store.check_version(3)
    with pytest.raises(StaleStoreError, match="version 3 .* 4"):
        store.check_version(4)
    assert store.layer(1).grad_begin == 8
    assert [store.keeps_attention_of(index) for index in range(3)] == [False, False, True]


# -- fold and unfold -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompts", "branches"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_fold_puts_the_rows_of_one_prompt_on_one_sequence(prompts, branches):
    """A row folded to the wrong prompt attends to a foreign prefix; one unfolded wrongly answers for another."""
    rows, heads = 4, 3
    for tail in ((), (5,)):
        shape = (rows, prompts * branches, heads, *tail)
        x = torch.arange(math.prod(shape)).reshape(shape)
        folded = fold(x, prompts)
        assert folded.shape == (prompts, heads, rows * branches, *tail)
        for prompt in range(prompts):
            own = x[:, prompt * branches : (prompt + 1) * branches, 1]
            assert sorted(folded[prompt, 1].reshape(-1).tolist()) == sorted(own.reshape(-1).tolist())
        assert torch.equal(unfold(folded, rows), x)


# -- core attention --------------------------------------------------------------------------------------------


def core_attention(softmax_scale=None, config_scale=None, kv_channels=8):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=kv_channels,
        softmax_scale=config_scale,
    )
    one_rank = SimpleNamespace(cp=None)
    return BranchCoreAttention(
        config, LAYER, AttnMaskType.causal, "self", softmax_scale=softmax_scale, pg_collection=one_rank
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, 8**-0.5),
        ({"kv_channels": 16}, 0.25),
        ({"config_scale": 0.11}, 0.11),
        ({"config_scale": 0.11, "softmax_scale": 0.7}, 0.7),
    ],
)
def test_softmax_scale_of_the_model(arguments, expected):
    """F13: a model with its own scale would silently run with 1/sqrt(head dim)."""
    core = core_attention(**arguments)
    dim = arguments.get("kv_channels", 8)
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(6, 2, 4, dim, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(6, 2, 2, dim, generator=generator, dtype=torch.float64) for _ in "kv")
    mb = MicroBatch(slice_sequence(0, 6, cp_rank=0, cp_size=1))
    out = core(q, k, v, packed_seq_params=BranchParams(micro_batch=mb))
    dense, _ = dense_attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), causal(6, 6), expected)
    assert_close({"out": out}, {"out": dense.permute(2, 0, 1, 3).reshape(6, 2, -1)}, torch.float64, "value")


CORE_CASE = AttentionCase(packs=(6,), dtype=torch.float32, scale=8**-0.5)


class CoreStep:
    """Capture, replay and walk back of one prompt through the core attention module itself."""

    def __init__(self, recompute, keep_attention=False, multiple=1):
        self.case = replace(CORE_CASE, keep_attention=keep_attention, multiple=multiple)
        self.core, self.recompute = core_attention(), recompute
        self.package = PackageRun(self.case)  # its store, its slices and its inputs
        self.grads = {}

    def run(self):
        run = self.package
        for index in range(run.plan.num_chunks):
            mb = run.chunk(index, appends=True)
            with torch.no_grad():
                self._attend(mb, *run.local("prefix", mb.rows)[:3])
        rows = run.slice(self.case.prefix_tokens, 6)
        self._train("pack0", MicroBatch(rows, 1, run.store, run.store.local_tokens, grad=True, head=True))
        for index in reversed(range(run.plan.num_chunks)):
            self._train(f"chunk{index}", run.chunk(index, grad=True, seeded=True))
        return self.grads

    def _train(self, name, mb):
        *leaves, dout = self.package.local(name if name.startswith("pack") else "prefix", mb.rows)
        for leaf in leaves:
            leaf.requires_grad_()
        if self.recompute:
            out = checkpoint(self._attend, mb, *leaves, use_reentrant=True, preserve_rng_state=False)
        else:
            out = self._attend(mb, *leaves)
        out.backward(dout.reshape(out.shape))
        assert not mb.recomputed, "an attention of the grad-off forward was left behind"
        self.grads |= {f"{name}.d{x}": leaf.grad for x, leaf in zip("qkv", leaves)}

    def _attend(self, mb, q, k, v):
        return self.core(q, k, v, packed_seq_params=BranchParams(micro_batch=mb))


@pytest.mark.parametrize("keep_attention", [False, True])
@pytest.mark.parametrize("multiple", [1, 4])
def test_core_attention_module_is_the_same_step(keep_attention, multiple):
    """The module appends valid rows only, keeps what the walk back needs and seeds it: gradients of a whole step."""
    grads = CoreStep(recompute=False, keep_attention=keep_attention, multiple=multiple).run()
    expected = textbook(CORE_CASE)
    valid = {}
    for name, grad in grads.items():
        part, kind = name.split(".")
        begin = 8 * int(part[5:]) if part.startswith("chunk") else 0
        tokens = min(8, 23 - begin) if part.startswith("chunk") else 6
        valid[name] = grad[:tokens]
        source = expected[f"prefix.{kind}" if part.startswith("chunk") else name]
        expected[name] = source[begin : begin + tokens]
    assert_close(valid, {name: expected[name] for name in valid}, torch.float32, "gradient")


def test_recompute_changes_no_bit_and_runs_attention_once():
    """Activation recompute takes the attention of the grad-off forward; computing it again would cost 22 to 27 % of a
    step, taking another micro-batch's would be wrong."""
    runs = {}
    for recompute in (False, True):
        with Tracker() as tracker:
            runs[recompute] = CoreStep(recompute).run(), tracker.attention_forwards
    assert runs[True][0].keys() == runs[False][0].keys()
    for name, grad in runs[True][0].items():
        assert torch.equal(grad, runs[False][0][name]), name
    assert runs[True][1] == runs[False][1]


# -- decoding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_tokens", [0, 1, 23])
@pytest.mark.parametrize("pad_rows", [1, 2])
def test_decode_equals_dense_attention(prefix_tokens, pad_rows):
    """Token by token against the store, each branch sees the prefix of its own prompt and its own earlier tokens."""
    case = AttentionCase(prefix_tokens=prefix_tokens, num_prompts=2, branches=2, packs=(6,))
    run = PackageRun(case)
    for index in range(run.plan.num_chunks):
        run.capture(index)
    decode = DecodeState(run.store, num_prompts=2, max_tokens=6, position=prefix_tokens)
    steps = []
    for step in range(6):
        rows = [run.inputs[f"pack0.{name}"][step : step + 1] for name in "qkv"]
        q, k, v = (torch.cat([row] + [torch.full_like(row, 3.0)] * (pad_rows - 1)) for row in rows)
        out = decode_attention(q, k, v, decode, LAYER, case.scale, None)
        assert out.shape == q.shape
        assert not out[1:].any()
        steps.append(out[:1])
        decode.advance()
    assert decode.position == prefix_tokens + 6
    expected = textbook(case)["pack0.out"]
    assert_close({"out": torch.cat(steps)}, {"out": expected}, torch.float64, "value")
