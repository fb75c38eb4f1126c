"""Log-probs of a model whose prefix state is kept in fp8."""
import numpy as np

from megatron_longstraw.mcore.calls import capture, score
from megatron_longstraw.mcore.packing import PromptBatch
from megatron_longstraw.prefix.state import TokenState
from tests.helpers import random_groups, tiny_policy


def scored(chunk_tokens):
    policy = tiny_policy(prefix_kv_dtype="fp8", prefix_chunk_tokens=chunk_tokens)
    batch = PromptBatch(random_groups(1, 110, [5, 8, 1]))
    return np.concatenate(list(score(policy, capture(policy, batch, walk_back=False), batch)[0].values()))


def test_fp8_does_not_depend_on_the_chunk_size(monkeypatch):
    """Up to float32 rounding, which now and then moves a value of the second layer to the next code."""
    assert np.abs(scored(7) - scored(200)).max() < 1e-4
    monkeypatch.setattr(TokenState, "as_stored", lambda self, x: x)
    assert np.abs(scored(7) - scored(200)).max() > 1e-3
