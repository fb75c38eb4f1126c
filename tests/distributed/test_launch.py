"""The launcher itself: a distributed test is worth something only if a failing or hanging rank fails the test."""
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launch import RankFailure, run_ranks

pytestmark = pytest.mark.dist


def add_ranks(rank, base):
    total = torch.tensor(float(base + rank))
    dist.all_reduce(total)
    return rank, total


def raise_on_one(rank):
    if rank == 1:
        raise ValueError("the reason")
    dist.barrier()  # never met: ends with a lost connection


def die_on_one(rank):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def hang_on_one(rank):
    if rank == 1:
        time.sleep(60)
    dist.barrier()


def test_results_come_back_by_rank():
    assert run_ranks(add_ranks, 2, 10) == [(0, torch.tensor(21.0)), (1, torch.tensor(21.0))]


def test_the_first_failure_is_reported():
    """Not the lost connection that the other rank sees."""
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2:.*raise_on_one.*ValueError: the reason"):
        run_ranks(raise_on_one, 2)


def test_a_dead_rank_is_reported():
    """A crash (SIGFPE, out of memory) leaves no traceback; its exit code or its peer's complaint must do."""
    with pytest.raises(RankFailure, match=r"died with exit code 7|rank 0 of 2:"):
        run_ranks(die_on_one, 2)


def test_a_hang_ends_and_says_where():
    """Most mistakes in collectives are hangs."""
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)ranks hang:.*hang_on_one"):
        run_ranks(hang_on_one, 2, timeout_s=1)
    assert time.monotonic() - begin < 40
