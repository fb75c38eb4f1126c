"""The order between computation and copies that host memory keeps on a GPU, on streams that need none.

The computation runs at once. What is queued on the copy stream runs as late as it may: when the computation waits for
it. So a wait that is missing shows as numbers that have not arrived.
"""
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_longstraw.prefix import storage
from megatron_longstraw.prefix.storage import Storage
from tests.attention_case import AttentionCase, run_package


class Queue:
    """A copy stream: operations that wait to be run, in order."""

    def __init__(self):
        self.operations, self.num_run = [], 0

    def wait_stream(self, computation):
        pass  # that has run already

    def record_event(self):
        return len(self.operations)

    def run_until(self, event):
        for operation, arguments in self.operations[self.num_run : event]:
            operation(*arguments)
        self.num_run = max(self.num_run, event)


class Queued(TorchDispatchMode):
    """Puts operations that write to a tensor off."""

    def __init__(self, queue):
        super().__init__()
        self.queue = queue

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor):
            self.queue.operations.append((func, args))
            return args[0]
        return func(*args, **(kwargs or {}))


class Computation:
    def __init__(self, queue):
        self.wait_event = queue.run_until


@pytest.fixture
def queue(monkeypatch):
    queue = Queue()
    copies = storage._Copies(torch.device("cpu"))
    copies.stream = queue
    monkeypatch.setattr(storage, "_copies_of", lambda device: copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Computation(queue))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Queued(stream))
    return queue


CASE = AttentionCase(dtype=torch.float32, num_prompts=2, walked_back=2, keep_attention=True, packs=(6, 3, 4))


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_late_copies_change_no_bit(queue, kv_dtype):
    in_order = run_package(replace(CASE, storage=Storage(kv_dtype=kv_dtype)))
    assert not queue.operations
    late = run_package(replace(CASE, storage=Storage(kv_dtype=kv_dtype, device_bytes=0, out_on_host=True)))
    assert queue.operations
    for name in in_order:
        assert torch.equal(in_order[name], late[name]), name


def test_the_next_block_comes_before_the_computation_waits(queue):
    """Three blocks of a cell each, K and V: two are on their way when the first is used, which alone is waited for."""
    state = storage.HostMemory([((1, 2, 12, 8), torch.float32)] * 2, torch.device("cpu"), cell_tokens=4)
    blocks = state.blocks([(0, 4), (4, 8), (8, 12)])
    for queued, run in ((4, 2), (6, 4), (6, 6)):
        next(blocks)
        assert (len(queue.operations), queue.num_run) == (queued, run)


def test_what_copies_read_is_held_until_the_next_are_queued(queue):
    """The computation may not use that memory again before, and two of them at most are held."""
    state = storage.HostMemory([((1, 2, 12, 8), torch.float32)], torch.device("cpu"), cell_tokens=4, zero=True)
    for number in range(3):
        state.add(4 * number, [torch.ones(1, 2, 4, 8)])
        assert len(queue.operations) - queue.num_run == 3  # brought, added to, taken back
    assert torch.equal(state.read(0, 12)[0], torch.ones(1, 2, 12, 8))


def test_a_wait_left_out_shows(queue, monkeypatch):
    monkeypatch.setattr(storage._Copies, "wait", lambda self, point: None)
    expected = run_package(CASE)
    late = run_package(replace(CASE, storage=Storage(device_bytes=0)))
    assert not torch.equal(expected["pack0.out"], late["pack0.out"])
