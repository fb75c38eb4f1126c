"""One call to Megatron-Core's own pipeline schedule over micro-batches that carry their own facts."""
from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_longstraw.context_parallel.layout import slice_sequence
from megatron_longstraw.mcore.packed import BranchParams
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.metering import Amount
from megatron_longstraw.prefix.graphs import ChunkGraphs
from megatron_longstraw.prefix.microbatch import MicroBatch


@dataclass
class CallItem:
    """One micro-batch of a call, this cp rank's slice of it."""

    params: BranchParams
    token_ids: np.ndarray
    """int64 [b, s], on the host: those of all chunks together would take device memory that grows with the prompt."""
    labels: Tensor | None = None
    """int64 [b, rows of the head]"""
    weights: Tensor | None = None
    """float32 [b, rows of the head]: dL/dlogp, normalised; None where no gradient is wanted."""
    head_rows: slice | None = None
    """Local rows whose labels are scored; None: all of them."""
    graphs: ChunkGraphs | None = None
    """Of a prompt chunk whose graph may be kept between two calls."""


OutputFn = Callable[[CallItem, Tensor], dict]


def run_call(
    policy: Policy, items: list[CallItem], *, grad: bool, head: bool = True, output: OutputFn | None = None
) -> list[dict]:
    """Run the micro-batches in order through `get_forward_backward_func()`.

    Args:
        grad: forward and backward; otherwise forward under `torch.no_grad` (Megatron's forward_only does not
            switch autograd off).
        head: of the micro-batches, see `MicroBatch`.
        output: what the last stage computes from the hidden states without a gradient (sampling); by default
            log-probs where an item has labels, and nothing where it has none.

    Returns:
        One dict per item on the last pipeline stage, [] elsewhere.

    Gradients go to `main_grad`, not yet summed over ranks. Ranks that must run in step (expert parallelism,
    interleaved pipelines) are given dummy micro-batches of weight 0.
    """
    padded = items + _dummies(policy, len(items), grad, head)
    if not padded:
        return []
    iterators = [iter(padded) for _ in policy.ddp]
    if len(items) > 1 and output is None:  # sampling counts its own steps
        iterators[-1] = _told(policy, padded)
    with policy.headless(), policy.no_sync() if grad else torch.no_grad():
        results = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, policy, grad, output),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=policy.ddp if len(policy.ddp) > 1 else policy.ddp[0],
            num_microbatches=len(padded),
            seq_length=1,  # shapes travel with the activations (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=not grad,
        )
    return results[: len(items)]


def _told(policy: Policy, items: list[CallItem]) -> Iterator[CallItem]:
    """The micro-batches, telling the meter how many went before each. The schedule asks for one when it is about to
    run it (of an interleaved pipeline's model chunks, the last one's turn comes last)."""
    done = [Amount(0)]
    for item in items:
        rows, last = item.params.micro_batch.rows, done[-1]
        tokens = rows.num_tokens * len(item.token_ids)
        pairs = tokens * (2 * rows.start + rows.num_tokens) // 2
        done.append(Amount(last.parts + 1, last.tokens + tokens, last.pairs + pairs))
    for item, before in zip(items, done):
        policy.meter.progress(before, done[-1])
        yield item


def _forward_step(policy: Policy, grad: bool, output: OutputFn | None, iterator, model):
    item = next(iterator)
    if policy.watchdog is not None:
        policy.watchdog.alive()
    token_ids = torch.tensor(item.token_ids, device=policy.layout.device)
    run = partial(model, token_ids, None, None, packed_seq_params=item.params)
    hidden = run() if item.graphs is None else item.graphs.forward(item.params.micro_batch, run)
    return hidden, partial(_loss, policy, grad, output, item)


def _loss(policy: Policy, grad: bool, output: OutputFn | None, item: CallItem, hidden: Tensor):
    """Megatron's loss function: (loss, token count, results). The 3-tuple with calculate_per_token_loss makes
    the schedule apply no factor (schedules.py:263-276); the count is unused because weights are normalised."""
    no_count = torch.zeros((), dtype=torch.int, device=hidden.device)
    if output is not None:
        return hidden.new_zeros(()), no_count, output(item, hidden)
    if item.labels is None or item.labels.numel() == 0:
        return ZeroLoss.apply(hidden), no_count, {}
    rows = policy.head.full_rows(hidden)[item.head_rows or slice(None)]  # [rows, b, h]
    logprobs, entropy = policy.head.logprobs(rows.reshape(-1, rows.shape[-1]), item.labels.t().reshape(-1))
    logprobs, entropy = (x.view(rows.shape[:2]) for x in (logprobs, entropy))
    loss = (logprobs * item.weights.t()).sum() if grad else logprobs.new_zeros(())
    return loss, no_count, {"logprobs": logprobs.detach(), "entropy": entropy}


class ZeroLoss(torch.autograd.Function):
    """Loss 0 with gradient exactly 0: the prefix backward starts from the seeds alone. (0 * h.sum() would turn
    an inf into NaN.)"""

    @staticmethod
    def forward(ctx, hidden):
        ctx.like = hidden.shape, hidden.dtype, hidden.device
        return torch.zeros((), dtype=torch.float32, device=hidden.device)

    @staticmethod
    def backward(ctx, _):
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device)


def _dummies(policy: Policy, num_items: int, grad: bool, head: bool) -> list[CallItem]:
    """Weight-0 micro-batches: expert-parallel ranks must run equally many (their all-to-alls pair up), and an
    interleaved schedule takes only multiples of the pipeline size (schedules.py:995-1016)."""
    target = num_items
    if policy.layout.ep_size > 1:
        count = torch.tensor(num_items, device=policy.layout.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        target = int(count)
    if len(policy.ddp) > 1:
        target = -(-target // policy.layout.pp_size) * policy.layout.pp_size
    return [_dummy(policy, grad, head) for _ in range(target - num_items)]


def _dummy(policy: Policy, grad: bool, head: bool) -> CallItem:
    layout = policy.layout
    rows = slice_sequence(0, 1, cp_rank=layout.cp_rank, cp_size=layout.cp_size, multiple=policy.prefix_row_multiple)
    token_ids = np.zeros((1, rows.local_tokens), dtype=np.int64)
    mb = MicroBatch(rows, grad=grad, head=head)
    params = BranchParams(micro_batch=mb, rotary_offset=rows.local_start, rotary_rows=rows.local_tokens)
    return CallItem(params, token_ids)
