"""How the longest context grows with the ranks, by the tool that says so."""
import pytest
from scaling import longest_contexts


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_two_ranks_hold_twice_the_context_in_as_many_bytes_each():
    one, two = longest_contexts([1, 2], 8192)
    assert two["bytes_per_rank"] <= one["bytes_per_rank"]
    assert two["of_linear"] >= 0.95
    # Of all ranks together: attention goes with the square of the context, all else with the context.
    pairs, flops = ([row["ranks"] * row[key] for row in (one, two)] for key in ("attention_pairs", "matmul_flops"))
    longer = two["positions"] / one["positions"]
    assert pairs[1] == pytest.approx(longer**2 * pairs[0], rel=0.15)
    assert flops[1] == pytest.approx(longer * flops[0], rel=0.15)
    assert one["received_bytes"] == 0 < two["received_bytes"]
