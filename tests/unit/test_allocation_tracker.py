"""Allocation counts against sums done by hand."""
from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from allocation_tracker import AllocationTracker

KB = 256  # float32 elements in 1024 bytes


def test_a_storage_counts_until_it_dies():
    with AllocationTracker() as tracker:
        a = torch.zeros(KB)
        b = torch.zeros(2 * KB)
        assert tracker.live_bytes == 3072
        del a
        assert tracker.live_bytes == 2048
        c = torch.zeros(KB // 2)
        assert (tracker.live_bytes, tracker.peak_bytes) == (2560, 3072)
    del b, c
    assert (tracker.live_bytes, tracker.peak_bytes) == (0, 3072)


def test_views_and_in_place_operators_allocate_nothing():
    with AllocationTracker() as tracker:
        a = torch.zeros(4, KB)
        view = a.t()[3:].reshape(-1, 4)[:2]
        a += 1
        a.mul_(2).clamp_(0)
        a[1].copy_(a[0])
        torch.add(a, a, out=a)
        assert tracker.peak_bytes == tracker.live_bytes == 4096
        del a
        assert tracker.live_bytes == 4096, "the view keeps the storage alive"
        del view
    assert tracker.live_bytes == 0


def test_what_existed_before_is_not_counted():
    weight, buffer = torch.zeros(KB), torch.zeros(KB)
    with AllocationTracker() as tracker:
        buffer.add_(weight)
        buffer[: KB // 2].zero_()
        weight.detach().view(2, -1)
        torch._foreach_add_([weight, buffer], 1.0)
        assert tracker.peak_bytes == 0
        del weight
        assert tracker.live_bytes == 0


def test_every_result_of_an_operator_counts():
    with AllocationTracker() as tracker:
        values, indices = torch.zeros(KB).sort()
        assert tracker.peak_bytes == 1024 + 1024 + 2048
        parts = torch._foreach_mul([values, values], 2.0)
        assert tracker.live_bytes == 3072 + 2 * 1024
        del parts


def test_literals_and_resizes_count():
    with AllocationTracker() as tracker:
        a = torch.tensor([1.0] * KB)
        assert tracker.live_bytes == 1024
        a.resize_(3 * KB)
        assert tracker.live_bytes == 3072


def test_the_largest_allocation_is_named():
    with AllocationTracker() as tracker:
        x = torch.zeros(16, 4)
        scores = x @ x.t()
        scores.sum()
    assert (tracker.largest.nbytes, tracker.largest.shape) == (1024, (16, 16))
    assert "mm" in tracker.largest.operator


def test_backward_counts_saved_tensors_and_gradients():
    x = torch.ones(KB, requires_grad=True)
    with AllocationTracker() as tracker:
        y = x.exp().exp()  # each exp saves its result
        assert tracker.live_bytes == 2048
        loss = y.sum()
        del y
        assert tracker.live_bytes == 2048 + 4
        loss.backward()
        # backward of the second exp holds its saved result, the first's, and the product beside them; the seed
        # of sum is a 4-byte one, expanded without memory.
        assert tracker.peak_bytes == 3 * 1024 + 8
        del loss
        assert tracker.live_bytes == 1024, "x.grad"
    x.grad = None
    assert tracker.live_bytes == 0


class Doubled(torch.autograd.Function):
    """2x with one temporary of 3 * KB in each direction."""

    @staticmethod
    def forward(ctx, x):
        torch.zeros(3 * KB)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        torch.zeros(3 * KB)
        return grad * 2


def test_custom_functions_count_in_both_directions():
    x = torch.ones(KB, requires_grad=True)
    with AllocationTracker() as tracker:
        y = Doubled.apply(x)
        assert (tracker.live_bytes, tracker.peak_bytes) == (1024, 3072)
        tracker.peak_bytes = 0
        y.backward(torch.ones(KB))
        assert tracker.peak_bytes == 1024 + 1024 + 3072, "y, its gradient, the temporary of backward"


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_holds_one_segment_at_a_time(reentrant):
    def segment(x):
        for _ in range(8):
            x = x.exp()
        return x

    def peak(recompute: bool) -> int:
        x = torch.zeros(KB, requires_grad=True)
        with AllocationTracker() as tracker:
            y = x * 1e-9
            for _ in range(4):
                y = checkpoint(segment, y * 0, use_reentrant=reentrant) if recompute else segment(y * 0)
            y.sum().backward()
        return tracker.peak_bytes

    plain, recomputed = peak(False), peak(True)
    assert plain >= 32 * 1024
    # 4 inputs of segments, 8 saved results of one of them, and a few gradients.
    assert 12 * 1024 <= recomputed <= 16 * 1024
