"""The most bytes that the planner says a step holds against the tensors that a step allocates."""
import pytest

from check_planner import BYTES, Case, world_size_of

TOLERANCE = 0.10


@pytest.mark.parametrize("name", [name for name, options in BYTES.items() if world_size_of(options) == 1])
def test_planned_peaks_are_near_those_of_a_step(name):
    measured, planned, parts = Case.build(BYTES[name]).bytes()
    assert abs(planned / measured - 1) <= TOLERANCE, f"{planned:,} of {measured:,}: {parts}"
