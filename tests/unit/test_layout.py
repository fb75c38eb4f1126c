"""Who holds which positions. Expected slices come from lists of positions cut by hand, not from the formulas."""
import itertools

import pytest

from megatron_longstraw.context_parallel.layout import plan_chunks, slice_sequence

SIZES = [(cp, multiple) for cp in (1, 2, 3, 4, 8) for multiple in (1, 2, 4)]
LENGTHS = [0, 1, 2, 3, 5, 7, 8, 16, 31, 32, 33, 100]


def ranks(start, num_tokens, cp_size, multiple=1):
    return [
        slice_sequence(start, num_tokens, cp_rank=rank, cp_size=cp_size, multiple=multiple) for rank in range(cp_size)
    ]


def valid_positions(part):
    return list(range(part.local_start, part.local_start + part.valid_local_tokens))


@pytest.mark.parametrize(("cp_size", "multiple"), SIZES)
def test_every_position_lives_on_exactly_one_rank(cp_size, multiple):
    """A dropped position loses a token silently (length 7 handled as 6); a doubled one trains it twice."""
    for start, length in itertools.product((0, 13), LENGTHS):
        parts = ranks(start, length, cp_size, multiple)
        held = [position for part in parts for position in valid_positions(part)]
        assert held == list(range(start, start + length)), (start, length)


@pytest.mark.parametrize(("cp_size", "multiple"), SIZES)
def test_rows_are_equal_and_padded_by_as_little_as_possible(cp_size, multiple):
    """Collectives need equal shapes on all ranks, sequence parallelism needs multiples of tp; a whole extra unit of
    pads would be paid for in every layer."""
    for length in LENGTHS:
        parts = ranks(0, length, cp_size, multiple)
        rows = {part.local_tokens for part in parts}
        assert len(rows) == 1
        (rows,) = rows
        assert rows % multiple == 0
        assert length <= rows * cp_size < length + cp_size * multiple
        assert [part.local_start for part in parts] == [rank * rows for rank in range(cp_size)]


@pytest.mark.parametrize(("cp_size", "multiple"), SIZES)
def test_pads_come_last(cp_size, multiple):
    """A pad before a real token would be seen by it: a rank after one with pads holds nothing."""
    for length in LENGTHS:
        parts = ranks(0, length, cp_size, multiple)
        for before, after in zip(parts, parts[1:]):
            assert after.valid_local_tokens == 0 or before.valid_local_tokens == before.local_tokens


def test_odd_length_keeps_its_last_token():
    """F06: 7 tokens on 2 ranks are padded to 8, not cut to 6."""
    first, second = ranks(0, 7, 2)
    assert (first.local_tokens, second.local_tokens) == (4, 4)
    assert valid_positions(first) == [0, 1, 2, 3]
    assert valid_positions(second) == [4, 5, 6]


def test_slices_are_contiguous():
    """F08: shards [0..3], [4..7]. Zigzag shards put back in this order would be misaligned silently."""
    values = list(range(8))
    assert [values[part.local_start : part.local_start + part.local_tokens] for part in ranks(0, 8, 2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


def test_a_sequence_is_cut_once():
    """F09: 32 tokens on 2 ranks leave 16 on each; cut twice they would be 8."""
    parts = ranks(0, 32, 2)
    assert [part.local_tokens for part in parts] == [16, 16]
    assert len({position for part in parts for position in valid_positions(part)}) == 32


def test_one_token_on_four_ranks():
    """The boundary token of a one-token response: one rank has it, the others have a pad each."""
    parts = ranks(9, 1, 4)
    assert [part.valid_local_tokens for part in parts] == [1, 0, 0, 0]
    assert [part.local_tokens for part in parts] == [1, 1, 1, 1]


# -- chunks ----------------------------------------------------------------------------------------------------


def plans(num_tokens, chunk_tokens, cp_size, multiple=1):
    return [
        plan_chunks(num_tokens, chunk_tokens, cp_rank=rank, cp_size=cp_size, multiple=multiple)
        for rank in range(cp_size)
    ]


@pytest.mark.parametrize(("cp_size", "multiple"), SIZES)
@pytest.mark.parametrize("chunk_tokens", [1, 3, 8, 64])
def test_chunks_tile_the_prefix(cp_size, multiple, chunk_tokens):
    """All chunks of all ranks together are the prefix, each position once, every chunk but the last full."""
    for length in LENGTHS:
        by_rank = plans(length, chunk_tokens, cp_size, multiple)
        assert {plan.num_chunks for plan in by_rank} == {len(range(0, length, chunk_tokens))}
        for index, chunks in enumerate(zip(*(plan.chunks for plan in by_rank))):
            begin = index * chunk_tokens
            positions = [position for chunk in chunks for position in valid_positions(chunk)]
            assert positions == list(range(begin, min(begin + chunk_tokens, length)))


@pytest.mark.parametrize(("cp_size", "multiple"), SIZES)
@pytest.mark.parametrize("chunk_tokens", [1, 3, 8, 64])
def test_offsets_are_where_the_valid_rows_land(cp_size, multiple, chunk_tokens):
    """The store is the concatenation of this rank's valid rows. An offset that counted pads would leave holes of
    uninitialised K, V in it."""
    for length in LENGTHS:
        by_rank = plans(length, chunk_tokens, cp_size, multiple)
        for plan in by_rank:
            filled = 0
            for index, chunk in enumerate(plan.chunks):
                assert plan.local_offset(index) == filled
                filled += len(valid_positions(chunk))
            assert plan.local_offset(plan.num_chunks) == filled
        assert sum(plan.local_offset(plan.num_chunks) for plan in by_rank) == length


def test_empty_prefix_has_no_chunk():
    """A one-token prompt: no capture, no store, no prefix backward."""
    for plan in plans(0, 8, 2):
        assert plan.num_chunks == 0
        assert plan.local_offset(0) == 0


@pytest.mark.parametrize("num_tokens", [2_097_151, 4_194_303, 2**33 + 5])
def test_positions_are_exact_in_the_millions(num_tokens):
    """Every position on one rank, at the place that its neighbours leave for it; nothing wraps at 2**31."""
    chunk_tokens, cp_size = num_tokens // 5, 8
    plans = [plan_chunks(num_tokens, chunk_tokens, cp_rank=rank, cp_size=cp_size) for rank in range(cp_size)]
    assert sum(plan.local_offset(plan.num_chunks) for plan in plans) == num_tokens
    for chunks in zip(*(plan.chunks for plan in plans)):
        starts = [(part.local_start, part.valid_local_tokens) for part in chunks if part.valid_local_tokens]
        assert all(begin + count == following for (begin, count), (following, _) in zip(starts, starts[1:]))
    last = max((part for plan in plans for part in plan.chunks), key=lambda part: part.local_start * (part.valid_local_tokens > 0))
    assert last.local_start + last.valid_local_tokens == num_tokens
