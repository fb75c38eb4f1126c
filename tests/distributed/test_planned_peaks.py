"""The most bytes that the planner says a step holds against what a step allocates, on ranks that share the work."""
import pytest

from check_planner import BYTES, Case, world_size_of

from .launch import run_ranks

CASES = [name for name, options in BYTES.items() if world_size_of(options) == 2]
TOLERANCE = 0.10


def peaks(rank: int) -> dict[str, tuple]:
    return {name: Case.build(BYTES[name]).bytes() for name in CASES}


@pytest.mark.dist
def test_planned_peaks_are_near_those_of_a_step():
    """A rank that holds less than the first of its stage (its slices are shorter) may be planned for more."""
    ranks = run_ranks(peaks, 2)
    for name in CASES:
        stages = 2 if BYTES[name].get("pipeline_model_parallel_size") else 1
        for rank, results in enumerate(ranks[:stages]):
            measured, planned, parts = results[name]
            found = f"{name}, rank {rank}: {planned:,} of {measured:,}: {parts}"
            assert abs(planned / measured - 1) <= TOLERANCE, found
