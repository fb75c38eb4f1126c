"""In what form and where a prefix state is kept: rounded K, V are read by everyone alike, and memory changes no bit."""
from dataclasses import replace

import pytest
import torch
from allocation_tracker import AllocationTracker

from megatron_longstraw.context_parallel.layout import plan_chunks
from megatron_longstraw.prefix.state import TokenState
from megatron_longstraw.prefix.storage import DeviceBudget, DeviceMemory, Float8, HostMemory, Storage, StoredBytes
from megatron_longstraw.prefix.store import PrefixStore
from tests.attention_case import AttentionCase, PackageRun, check, run_package
from tests.oracles.rounded import as_fp8, e4m3_values
from tests.tolerances import errors

ALL_ON_HOST = Storage(device_bytes=0, out_on_host=True)
LOSSY = {
    "several chunks and blocks": AttentionCase(),
    "two prompts, last 2 chunks": AttentionCase(num_prompts=2, walked_back=2, block_tokens=7),
    "kept attention, forwards first": AttentionCase(keep_attention=True, forwards_first=True),
    "padded rows": AttentionCase(multiple=4),
    "frozen": AttentionCase(walked_back=0),
}

# -- codecs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("name", LOSSY)
def test_outputs_and_straight_through_gradients(name, kv_dtype, dtype):
    """Plain autograd of dense attention whose prefix K, V are rounded with a straight-through gradient; those of the
    branches are not rounded."""
    case = replace(LOSSY[name], storage=Storage(kv_dtype=kv_dtype), dtype=dtype)
    check(case, run_package(case))


def as_written(monkeypatch):
    """The mistake of reading a chunk's own K, V before they are rounded."""
    monkeypatch.setattr(TokenState, "as_stored", lambda self, x: x)


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
def test_the_chunk_that_writes_reads_what_others_read(kv_dtype, monkeypatch):
    """Otherwise the function would depend on where the prompt is cut."""
    case = AttentionCase(storage=Storage(kv_dtype=kv_dtype))

    def difference():
        one, many = (run_package(replace(case, chunk_tokens=tokens)) for tokens in (64, 5))
        return max(errors(many, one).values())

    assert difference() < 1e-13
    as_written(monkeypatch)
    assert difference() > 1e-4
    with pytest.raises(AssertionError, match="relative errors"):
        check(case, run_package(case))


def test_fp8_rounds_to_the_nearest_code():
    """Every code, every middle between two and what lies beside it, at several scales, both signs."""
    codes = e4m3_values()
    middles = (codes[1:] + codes[:-1]) / 2
    ladder = torch.cat([codes, middles, middles * (1 + 1e-6), middles * (1 - 1e-6)])
    rows = torch.stack([ladder, -ladder]).float() * torch.tensor([1.0, 2.0**-9, 2.0**20])[:, None, None]
    assert rows.abs().amax(-1).unique().tolist() == [448 * 2.0**-9, 448.0, 448 * 2.0**20]
    assert torch.equal(round_trip(rows).double(), as_fp8(rows))


def round_trip(x):
    codec = Float8()
    return codec.decode(codec.encode(x), x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_zeros_stays_zero(dtype):
    """L04: its scale must not divide 0 by 0."""
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[1, 0] = 0
    back = round_trip(x)
    assert torch.equal(back[1, 0], torch.zeros(8, dtype=dtype))
    assert back.isfinite().all() and not torch.equal(back, torch.zeros_like(back))


@pytest.mark.parametrize("largest", [3e38, 1e-30, 2e-38, 9.35e-43, 1e-45])
def test_no_value_is_out_of_range(largest):
    """At both ends of float32, where amax / 448 is not an ordinary number."""
    x = torch.linspace(-1, 1, 16)[None] * largest
    back = round_trip(x)
    assert back.isfinite().all()
    assert (back - x).abs().max() <= max(largest / 16, torch.finfo(torch.float32).tiny)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_no_number_stays_visible(bad):
    """Clamped to a number it would train on silently; other tokens and heads are not touched."""
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
    clean = round_trip(x)
    x[1, 0, 3] = bad
    back = round_trip(x)
    assert back[1, 0, 3].isnan()
    back[1, 0] = clean[1, 0]
    assert torch.equal(back, clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16", None])
def test_blocks_give_what_the_writer_saw(kv_dtype, dtype):
    rows = [torch.randn(9, 2, 2, 8, generator=torch.Generator().manual_seed(i)).to(dtype) for i in (1, 2)]
    state = TokenState(9, 9, 4, Storage(kv_dtype=kv_dtype))
    state.append(0, *rows)
    blocks = list(state.blocks(9))
    for name, x in zip("kv", rows):
        read = torch.cat([getattr(block, name) for block in blocks], dim=2).permute(2, 0, 1, 3)
        assert read.dtype == dtype
        assert torch.equal(read, state.as_stored(x))


@pytest.mark.parametrize(
    ("storage", "kv", "grad"),
    [
        (Storage(), 8 * 4, 8 * 4),
        (Storage(kv_dtype="bf16", grad_dtype="bf16"), 8 * 2, 8 * 2),
        (Storage(kv_dtype="fp8"), 8 + 4, 8 * 4),
    ],
)
def test_bytes_of_a_row(storage, kv, grad):
    """Of 8 values in float32: K and V of 23 tokens and 2 heads, gradients of the 15 tokens of the last two chunks."""
    run = PackageRun(AttentionCase(dtype=torch.float32, storage=storage, walked_back=2))
    run.run()
    assert run.state.nbytes == StoredBytes(device=2 * 2 * (23 * kv + 15 * grad))
    host = PackageRun(AttentionCase(dtype=torch.float32, storage=replace(storage, device_bytes=0), walked_back=2))
    host.run()
    assert host.state.nbytes == StoredBytes(host=run.state.nbytes.device)


def test_gradients_in_bfloat16_are_sums_in_bfloat16():
    """About three digits, and only where they are asked for: dq does not pass through the store."""
    case = AttentionCase(dtype=torch.float32, packs=(6, 3, 4, 5))
    exact, rounded = run_package(case), run_package(replace(case, storage=Storage(grad_dtype="bf16")))
    found = errors(rounded, exact)
    through_the_store = {name: found.pop(name) for name in ("prefix.dk", "prefix.dv", "store.dk", "store.dv")}
    assert all(2.0**-11 < error < 2.0**-7 for error in through_the_store.values()), through_the_store
    assert set(found.values()) == {0.0}


# -- places ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("walked_back", [None, 2])
def test_host_memory_changes_no_bit(dtype, kv_dtype, grad_dtype, walked_back):
    """Blocks of 5 and chunks of 8 tokens, so that both cross the cells that host memory is cut into."""
    case = AttentionCase(dtype=dtype, num_prompts=2, walked_back=walked_back, keep_attention=True)
    storage = Storage(kv_dtype=kv_dtype, grad_dtype=grad_dtype)
    device, host = (
        run_package(replace(case, storage=replace(storage, device_bytes=limit, out_on_host=out_on_host)))
        for limit, out_on_host in ((None, False), (0, True))
    )
    assert device.keys() == host.keys()
    for name in device:
        assert torch.equal(device[name], host[name]), name


@pytest.mark.parametrize("cell_tokens", [1, 4, 5, 23, 100])
def test_host_memory_is_device_memory_elsewhere(cell_tokens):
    """Writes, sums and reads at any border."""
    shapes = [((2, 3, 23, 4), torch.float32), ((2, 3, 23, 1), torch.bfloat16)]
    cpu = torch.device("cpu")
    memories = [DeviceMemory(shapes, cpu, zero=True), HostMemory(shapes, cpu, cell_tokens, zero=True)]
    generator = torch.Generator().manual_seed(1)
    for begin, end in ((0, 8), (8, 23), (3, 4), (2, 21), (22, 23)):
        parts = [torch.randn(2, 3, end - begin, width, generator=generator) for width in (4, 1)]
        for memory in memories:
            memory.write(begin, [part.to(dtype) for part, (_, dtype) in zip(parts, shapes)])
            memory.add(begin, parts)
    ranges = [(0, 5), (5, 10), (10, 12), (12, 17), (17, 23)]
    for device, host in zip(*(memory.blocks(ranges) for memory in memories)):
        assert all(torch.equal(a, b) for a, b in zip(device, host))
    assert all(torch.equal(a, b) for a, b in zip(*(memory.read(7, 20) for memory in memories)))


def test_layers_stay_on_the_device_while_they_fit():
    """First come, first served: K, V of whole layers, which decoding reads too, and what they leave for gradients."""
    plan = plan_chunks(10, 4, cp_rank=0, cp_size=1)
    rows = torch.ones(10, 1, 2, 8)
    kv, grad = (2 * tokens * 2 * 8 * 4 for tokens in (10, 6))
    for limit, kv_layers, grad_layers in (
        (None, 3, 3), (0, 0, 0), (kv - 1, 0, 1), (kv, 1, 0), (3 * kv - 1, 2, 1), (3 * kv + 2 * grad, 3, 2), (9**9, 3, 3)
    ):  # fmt: skip
        store = PrefixStore(1, plan, 2, 0, block_tokens=4, keep_attention=False, storage=Storage(device_bytes=limit))
        for number in (4, 5, 6):
            store.layer(number).append(0, rows, rows)
            store.layer(number).append(0, rows, rows)  # again, as recompute does
        captured = [store.layers[number].nbytes for number in (4, 5, 6)]
        assert captured == [StoredBytes(device=kv)] * kv_layers + [StoredBytes(host=kv)] * (3 - kv_layers)
        for number in (6, 5, 4):
            for block in store.layer(number).blocks(10):
                if block.wants_grad:
                    store.layer(number).add_grad(block, block.k, block.v)
        device = kv_layers * kv + grad_layers * grad
        assert store.nbytes == StoredBytes(device, 3 * (kv + grad) - device)


def test_a_budget_without_limit_is_not_used_up():
    budget = DeviceBudget(None)
    assert budget.take(10**15) and budget.take(10**15)


def test_attention_kept_on_the_host_leaves_the_device():
    """And is freed with its chunk's backward."""
    run = PackageRun(AttentionCase(dtype=torch.float32, keep_attention=True, storage=Storage(out_on_host=True)))
    for index in range(run.plan.num_chunks):
        run.capture(index)
    assert run.state.nbytes == StoredBytes(device=2 * 23 * 2 * 8 * 4, host=23 * 4 * (8 + 1) * 4)
    run.walk_back(2)()
    assert run.state.nbytes.host == 16 * 4 * (8 + 1) * 4


# -- memory ----------------------------------------------------------------------------------------------------

BLOCK = 2 * 32 * 2 * 8
"""Elements of K and V in a block of 32 tokens, 2 heads of 8."""


def replayed(storage, prefix_tokens=256, dtype=torch.float32):
    """A filled state that has been read once: what has the prefix's length exists."""
    case = AttentionCase(
        prefix_tokens=prefix_tokens, chunk_tokens=64, block_tokens=32, dtype=dtype, storage=storage, keep_attention=True
    )
    run = PackageRun(case)
    for index in range(run.plan.num_chunks):
        run.capture(index)
    run.replay(0)()
    run.replay(1)()
    run.walk_back(run.plan.num_chunks - 1)()
    return run


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
@pytest.mark.parametrize("place", ["device", "host"])
def test_no_temporary_grows_with_the_prefix(place, kv_dtype):
    peaks = []
    for prefix_tokens in (256, 2048):
        run = replayed(replace(ALL_ON_HOST if place == "host" else Storage(), kv_dtype=kv_dtype), prefix_tokens)
        with AllocationTracker() as tracker:
            run.replay(0)()
        peaks.append((tracker.peak_bytes, tracker.largest.nbytes))
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(
    ("storage", "staged", "read"),
    [
        (Storage(), 0, 0),
        (Storage(kv_dtype="fp8"), 0, 2 * 4 * BLOCK + 4 * BLOCK // 2),
        (ALL_ON_HOST, 2 * 4 * BLOCK, 0),
        (replace(ALL_ON_HOST, kv_dtype="fp8"), 2 * (BLOCK + 4 * BLOCK // 8), 2 * 4 * BLOCK),
    ],
)
def test_at_most_two_blocks_are_staged(storage, staged, read):
    """Of fp8, two blocks of codes and scales beside two that are read: the one in use, and the next replacing it."""
    run = replayed(storage)
    with AllocationTracker() as tracker:
        for block in run.state.blocks(256):
            pass
    assert tracker.peak_bytes <= staged + read


def test_gradients_on_the_host_are_summed_a_block_at_a_time():
    run = replayed(ALL_ON_HOST)
    block = next(iter(run.state.blocks(32)))
    with AllocationTracker() as tracker:
        run.state.add_grad(block, block.k, block.v)
    assert tracker.peak_bytes == 4 * BLOCK
