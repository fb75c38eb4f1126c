"""The calls of one optimizer step (DESIGN section 2), each one pass through Megatron-Core's schedule.

    call             micro-batches  order       autograd  attention sees
    capture          chunks         ascending   off       stored prefix + causal inside; appends its K, V
    score            branches       any         off       stored prefix + causal inside
    replay           branches       any         on        the same; dK, dV of the prefix go to the store
    prefix_backward  chunks         DESCENDING  on        earlier chunks + causal inside; own K, V seeded

Chunks whose graph is kept (`--prefix-graph-bytes`) run under autograd in capture and forward nowhere else.

Descending order is what makes the seeds complete: by the time a chunk runs backward, all branches and all later
chunks have added their share.
"""
from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from megatron_longstraw.context_parallel.collectives import all_gather_rows
from megatron_longstraw.mcore.packed import BranchParams
from megatron_longstraw.mcore.packing import (
    BranchPack,
    PromptBatch,
    branch_ids,
    chunk_plan,
    local_columns,
    local_rows,
    pack_branches,
    pack_values,
    sequence_slice,
)
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.mcore.schedule import CallItem, run_call
from megatron_longstraw.prefix.microbatch import MicroBatch
from megatron_longstraw.prefix.storage import Storage
from megatron_longstraw.prefix.store import PrefixStore
from megatron_longstraw.types import PromptGroup

Table = dict[tuple[int, int], np.ndarray]
"""Per-token float32 values by (prompt of the batch, branch of the group)."""


def capture(policy: Policy, batch: PromptBatch | None, *, walk_back: bool = True) -> PrefixStore | None:
    """Run the prompts (all but their last token) once without autograd and keep every layer's K, V.

    Args:
        batch: None when this data-parallel rank has no prompt left but expert-parallel peers do.
        walk_back: the store may serve an update; False keeps nothing for a prefix backward (sampling, scoring).
    """
    if batch is None:
        with policy.prefix_precision():
            run_call(policy, [], grad=False, head=False)
        return None
    store = open_store(policy, batch, walk_back=walk_back)
    capture_chunks(policy, store, batch, range(store.plan.num_chunks))
    return store


def open_store(policy: Policy, batch: PromptBatch, *, walk_back: bool = True) -> PrefixStore:
    """The store of a capture that has not begun; see `capture`."""
    prefix = policy.config.prefix
    plan = chunk_plan(batch.num_prefix_tokens, prefix.prefix_chunk_tokens, policy.layout, policy.prefix_row_multiple)
    store = PrefixStore(
        num_prompts=batch.num_prompts,
        plan=plan,
        num_chunks_walked_back=prefix.num_chunks_walked_back(plan.num_chunks) if walk_back else 0,
        weights_version=policy.weights_version,
        block_tokens=prefix.prefix_block_tokens,
        keep_attention=prefix.prefix_out_tier != "none",
        storage=Storage(
            kv_dtype=prefix.prefix_kv_dtype,
            grad_dtype=prefix.prefix_grad_dtype,
            device_bytes=prefix.prefix_device_bytes,
            out_on_host=prefix.prefix_out_tier == "host",
        ),
    )
    store.graphs = policy.chunk_graphs(range(store.first_chunk_walked_back, plan.num_chunks))
    return store


def capture_chunks(policy: Policy, store: PrefixStore, batch: PromptBatch, chunks: range) -> None:
    """Run these chunks of the prompts, which have to follow those that the store holds."""
    items = [_chunk_item(policy, store, batch, index, appends=True) for index in chunks]
    num_tokens = sum(store.plan.chunks[index].num_tokens for index in chunks)
    with policy.meter.measure("capture", batch.num_prompts * num_tokens), policy.prefix_precision():
        run_call(policy, items, grad=False, head=False)


def score(policy: Policy, store: PrefixStore | None, batch: PromptBatch | None) -> tuple[Table, Table]:
    """Log-probs and entropies of every response token under the current weights, on all ranks of the cell."""
    return _run_branches(policy, store, batch, weights=None)


def replay(policy: Policy, store: PrefixStore | None, batch: PromptBatch | None, weights: Table | None) -> tuple[Table, Table]:
    """Forward and backward of sum(weights * logprobs) over the branches; dK, dV of the prefix go to the store.

    The same packing and kernels as `score`, so that log-probs of one set of weights agree to the last bit.
    """
    return _run_branches(policy, store, batch, weights=weights if weights is not None else {})


def response_logits(policy: Policy, group: PromptGroup) -> list[np.ndarray]:
    """float32 logits [R, vocab] of every response's tokens, on all ranks of the cell: the distributions they were
    drawn from, at temperature 1. For comparison with other implementations; training never holds them."""
    batch = PromptBatch([group])
    store = capture(policy, batch, walk_back=False)
    packs = pack_branches(batch, 1)
    items = [_branch_item(policy, store, batch, pack, weights=None) for pack in packs]

    def logits(item: CallItem, hidden: torch.Tensor) -> dict:
        rows = policy.head.full_rows(hidden)
        return {"logits": policy.head.logits(rows.reshape(-1, rows.shape[-1])).view(*rows.shape[:2], -1)}

    outputs = run_call(policy, items, grad=False, output=logits)
    store.release()
    table = _branch_table(policy, batch, packs, items, outputs, "logits", (policy.config.model.vocab_size,))
    return [table[0, index] for index in range(len(group.branches))]


def prefix_backward(policy: Policy, store: PrefixStore | None, batch: PromptBatch | None) -> None:
    """Carry the gradient that replay left in the store through the prompt, last chunk first."""
    if policy.config.prefix.prefix_grad == "frozen":
        return
    if batch is None:
        with policy.prefix_precision():
            run_call(policy, [], grad=True, head=False)
        return
    store.check_version(policy.weights_version)
    walked_back = range(store.first_chunk_walked_back, store.plan.num_chunks)
    items = [_chunk_item(policy, store, batch, index, grad=True, seeded=True) for index in reversed(walked_back)]
    again = [index for index in walked_back if store.graphs is None or not store.graphs.keeps(index)]
    num_tokens = sum(store.plan.chunks[index].num_tokens for index in again)
    with policy.meter.measure("prefix_backward", batch.num_prompts * num_tokens), policy.prefix_precision():
        run_call(policy, items, grad=True, head=False)


def full_sequences(policy: Policy, batch: PromptBatch | None, weights: Table | None) -> tuple[Table, Table]:
    """The conventional schedule: every branch as one full sequence, without a store (`--schedule full`).

    `weights` None scores only. One branch per micro-batch; the head sees response positions only.
    """
    grad = weights is not None
    places = [] if batch is None else [
        (prompt, index)
        for prompt, group in enumerate(batch.groups)
        for index, branch in enumerate(group.branches)
        if branch.num_tokens
    ]
    items = [_full_item(policy, batch, place, weights) for place in places]
    with policy.meter.measure("full" if grad else "score", sum(item.params.micro_batch.rows.num_tokens for item in items)):
        outputs = run_call(policy, items, grad=grad)
    return tuple(_full_table(policy, batch, places, items, outputs, name) for name in ("logprobs", "entropy"))


def _chunk_item(policy: Policy, store: PrefixStore, batch: PromptBatch, index: int, **facts) -> CallItem:
    rows = store.plan.chunks[index]
    ids = batch.prefix_ids(rows.start, rows.start + rows.num_tokens)
    mb = MicroBatch(
        rows=rows,
        num_prompts=batch.num_prompts,
        store=store,
        visible_tokens=store.plan.local_offset(index),
        chunk_index=index,
        **facts,
    )
    return CallItem(_params(mb), local_columns(ids, rows), graphs=store.graphs)


def _params(mb: MicroBatch) -> BranchParams:
    return BranchParams(micro_batch=mb, rotary_offset=mb.rows.local_start, rotary_rows=mb.rows.local_tokens)


def _run_branches(policy, store, batch, weights: Table | None) -> tuple[Table, Table]:
    grad = weights is not None
    if batch is None:
        run_call(policy, [], grad=grad)
        return {}, {}
    store.check_version(policy.weights_version)
    packs = pack_branches(batch, policy.config.prefix.branches_per_microbatch)
    items = [_branch_item(policy, store, batch, pack, weights) for pack in packs]
    num_tokens = sum(branch.num_tokens for group in batch.groups for branch in group.branches)
    with policy.meter.measure("replay" if grad else "score", num_tokens):
        outputs = run_call(policy, items, grad=grad)
    return tuple(_branch_table(policy, batch, packs, items, outputs, name) for name in ("logprobs", "entropy"))


def _branch_item(policy: Policy, store: PrefixStore, batch: PromptBatch, pack: BranchPack, weights: Table | None) -> CallItem:
    rows = sequence_slice(batch.num_prefix_tokens, pack.num_tokens, policy.layout)
    mb = MicroBatch(
        rows=rows,
        num_prompts=batch.num_prompts,
        store=store,
        visible_tokens=store.local_tokens,
        grad=weights is not None,
        head=True,
    )
    device = policy.layout.device
    inputs, labels = branch_ids(batch, pack)
    local_weights = None if weights is None else local_rows(pack_values(pack, weights), rows, device)
    return CallItem(_params(mb), local_columns(inputs, rows), local_rows(labels, rows, device), local_weights)


def _branch_table(policy, batch, packs: list[BranchPack], items: list[CallItem], outputs: list[dict], name: str, width=()) -> Table:
    """Gather per-token results over cp and send them from the last stage to the whole cell."""
    layout = policy.layout
    shapes = [
        (item.params.micro_batch.rows.local_tokens * layout.cp_size, len(pack.rows), *width)
        for item, pack in zip(items, packs)
    ]
    parts = [all_gather_rows(output[name], layout.groups.cp) for output in outputs]  # [S, b, *width] each
    table: Table = {}
    for pack, values in zip(packs, _to_all_stages(policy, parts, shapes)):
        for row, place in enumerate(pack.rows):
            if place is not None:
                num_tokens = batch.groups[place[0]].branches[place[1]].num_tokens
                table[place] = values[:num_tokens, row].copy()
    return table


def _to_all_stages(policy: Policy, parts: list[torch.Tensor], shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Tensors of known shapes from the last pipeline stage to every stage, as host arrays."""
    layout = policy.layout
    sizes = [int(np.prod(shape)) for shape in shapes]
    if layout.is_last_stage and parts:
        flat = torch.cat([part.reshape(-1).float() for part in parts])
    else:
        flat = torch.zeros(sum(sizes), device=layout.device)
    if layout.pp_size > 1 and flat.numel():
        dist.broadcast(flat, src=dist.get_process_group_ranks(layout.groups.pp)[-1], group=layout.groups.pp)
    host = flat.cpu().numpy()
    ends = np.cumsum(sizes)
    return [host[end - size : end].reshape(shape) for end, size, shape in zip(ends, sizes, shapes)]


def _full_item(policy: Policy, batch: PromptBatch, place: tuple[int, int], weights: Table | None) -> CallItem:
    group = batch.groups[place[0]]
    response = group.branches[place[1]].response_ids
    ids = np.concatenate([group.prompt_ids, response[:-1]])[None]
    rows = sequence_slice(0, ids.shape[1], policy.layout)
    begin = max(group.num_prefix_tokens - rows.local_start, 0)
    head = slice(min(begin, rows.local_tokens), max(rows.valid_local_tokens, min(begin, rows.local_tokens)))
    first = rows.local_start + head.start - group.num_prefix_tokens  # response token of the first scored row
    device = policy.layout.device

    def scored(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values[None, first : first + head.stop - head.start].copy()).to(device)

    mb = MicroBatch(rows=rows, grad=weights is not None, head=True)
    return CallItem(
        _params(mb),
        local_columns(ids, rows),
        scored(response),
        None if weights is None else scored(weights[place]),
        head,
    )


def _full_table(policy, batch, places, items: list[CallItem], outputs: list[dict], name: str) -> Table:
    """Scatter each rank's response rows into full rows, sum over cp, send to all stages."""
    layout = policy.layout
    parts, shapes = [], []
    for number, place in enumerate(places):
        rows = items[number].params.micro_batch.rows
        prefix_tokens = batch.groups[place[0]].num_prefix_tokens
        shapes.append((batch.groups[place[0]].branches[place[1]].num_tokens,))
        if not outputs:
            continue
        values = torch.zeros(shapes[-1], device=layout.device)
        if name in outputs[number]:
            head = items[number].head_rows
            first = rows.local_start + head.start - prefix_tokens
            values[first : first + head.stop - head.start] = outputs[number][name][:, 0]
        if layout.cp_size > 1:
            dist.all_reduce(values, group=layout.groups.cp)
        parts.append(values)
    return dict(zip(places, (values.copy() for values in _to_all_stages(policy, parts, shapes))))
