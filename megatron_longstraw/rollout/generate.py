"""Sampling the responses of captured prompts: the state that training needs is the prefill that sampling needs.

All branches of a batch step in lockstep through Megatron's forward-only schedule. Context parallelism gives every
rank whole branches; only the prefix is sharded. The last stage samples; token ids go back to the first stage.
Every random number is keyed by (seed, step, prompt, branch, position), so the layout changes nothing.
"""
from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longstraw.mcore.packed import BranchParams
from megatron_longstraw.mcore.packing import PromptBatch
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.mcore.schedule import CallItem, run_call
from megatron_longstraw.metering import Amount
from megatron_longstraw.prefix.decode import DecodeState
from megatron_longstraw.prefix.store import PrefixStore
from megatron_longstraw.rollout.sampling import keyed_uniform, sample
from megatron_longstraw.types import Branch


def generate(policy: Policy, store: PrefixStore | None, batch: PromptBatch | None, *, step: int) -> None:
    """Fill every group of the batch with `group_size` sampled branches (the same on all ranks of the cell).

    A branch's `rollout_logprobs` are those of the distribution it was sampled from (renormalised over the nucleus
    when top_p < 1). A sampled stop id belongs to the response.

    `batch` None: take part in the steps that expert-parallel peers still run.
    """
    if batch is not None:
        store.check_version(policy.weights_version)
    tokens_before = policy.meter.tokens("rollout")
    with policy.meter.measure("rollout"):
        rows = None if batch is None else _Rows(policy, store, batch, step)
        longest = policy.config.rollout.max_response_length
        for length in range(longest):
            policy.meter.progress(Amount(length), Amount(longest))
            if _everyone_done(policy, rows):
                break
            _decode_step(policy, rows)
        if batch is not None:
            rows.deliver()
    if batch is not None:
        sampled = sum(branch.num_tokens for group in batch.groups for branch in group.branches)
        policy.meter.costs["rollout"].tokens = tokens_before + sampled


class _Rows:
    """The branches this context-parallel rank decodes, prompt-major, equally many on every rank."""

    def __init__(self, policy: Policy, store: PrefixStore, batch: PromptBatch, step: int):
        self.policy, self.batch, self.step = policy, batch, step
        layout, rollout = policy.layout, policy.config.rollout
        width = -(-rollout.group_size // layout.cp_size)
        first = layout.cp_rank * width
        self.places = [(prompt, first + i) for prompt in range(batch.num_prompts) for i in range(width)]
        self.decode = DecodeState(store, batch.num_prompts, rollout.max_response_length, batch.num_prefix_tokens)
        self.token_ids = np.repeat(batch.boundary_ids(), width)
        self.responses: list[list[int]] = [[] for _ in self.places]
        self.logprobs: list[list[float]] = [[] for _ in self.places]
        # Rows past the group size only fill the batch.
        self.finish: list[str | None] = [None if branch < rollout.group_size else "filler" for _, branch in self.places]

    @property
    def done(self) -> bool:
        return all(self.finish)

    def item(self) -> CallItem:
        layout = self.policy.layout
        ids = np.zeros((len(self.places), layout.row_multiple), dtype=np.int64)
        ids[:, 0] = self.token_ids
        return CallItem(
            BranchParams(decode=self.decode, rotary_offset=self.decode.position, rotary_rows=layout.row_multiple), ids
        )

    def sample(self, hidden: Tensor) -> Tensor:
        """float64 [2, rows]: token ids and log-probs of this step, on the last stage."""
        head, rollout = self.policy.head, self.policy.config.rollout
        logits = head.logits(head.full_rows(hidden)[0])
        seed, position = self.policy.config.run.seed, self.decode.length
        uniforms = [
            keyed_uniform(seed, self.step, self.batch.groups[prompt].group_id, branch, position)
            for prompt, branch in self.places
        ]
        uniforms = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
        drawn = sample(logits, uniforms, rollout.temperature, rollout.top_p)
        return torch.stack([drawn.token_ids.double(), drawn.logprobs.double()])

    def accept(self, drawn: np.ndarray) -> None:
        stop_ids = self.policy.config.rollout.stop_token_ids
        self.token_ids = drawn[0].astype(np.int64)
        for row, (token, logprob) in enumerate(zip(self.token_ids.tolist(), drawn[1])):
            if self.finish[row]:
                continue
            if not np.isfinite(logprob):
                prompt, branch = self.places[row]
                group = self.batch.groups[prompt].group_id
                raise FloatingPointError(
                    f"sampling group {group!r}, branch {branch}, token {self.decode.length}: the model's output is not "
                    f"finite ({logprob}); the weights are broken, lower --lr or restart from a checkpoint"
                )
            self.responses[row].append(token)
            self.logprobs[row].append(logprob)
            if token in stop_ids:
                self.finish[row] = "stop"
            elif len(self.responses[row]) == self.policy.config.rollout.max_response_length:
                self.finish[row] = "length"

    def deliver(self) -> None:
        """Collect the branches of all context-parallel ranks into the groups."""
        layout = self.policy.layout
        own = dict(zip(self.places, zip(self.responses, self.logprobs, self.finish)))
        parts = [own]
        if layout.cp_size > 1:
            parts = [None] * layout.cp_size
            dist.all_gather_object(parts, own, group=layout.groups.cp)
        everyone = {place: row for part in parts for place, row in part.items()}
        for prompt, group in enumerate(self.batch.groups):
            rows = [everyone[prompt, index] for index in range(self.policy.config.rollout.group_size)]
            group.branches = [
                Branch(ids, rollout_logprobs=np.array(logprobs, dtype=np.float32), finish_reason=reason)
                for ids, logprobs, reason in rows
            ]


def _everyone_done(policy: Policy, rows: _Rows | None) -> bool:
    """Ranks that meet inside a decoding step (cp gathers queries, ep exchanges tokens) must stop together."""
    layout = policy.layout
    done = torch.tensor(float(rows is None or rows.done), device=layout.device)
    if layout.ep_size > 1:
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
    elif layout.cp_size > 1:
        dist.all_reduce(done, op=dist.ReduceOp.MIN, group=layout.groups.cp)
    return bool(done)


def _decode_step(policy: Policy, rows: _Rows | None) -> None:
    if rows is None:
        run_call(policy, [], grad=False, output=_nothing)
        return
    outputs = run_call(
        policy, [rows.item()], grad=False, output=lambda item, hidden: _sample_if_real(rows, item, hidden)
    )
    layout = policy.layout
    drawn = outputs[0]["drawn"] if layout.is_last_stage else None
    if layout.pp_size > 1:
        if drawn is None:
            drawn = torch.zeros((2, len(rows.places)), dtype=torch.float64, device=layout.device)
        dist.broadcast(drawn, src=dist.get_process_group_ranks(layout.groups.pp)[-1], group=layout.groups.pp)
    rows.accept(drawn.cpu().numpy())
    rows.decode.advance()


def _sample_if_real(rows: _Rows, item: CallItem, hidden: Tensor) -> dict:
    """Dummy micro-batches (see `run_call`) are not decoding steps."""
    return {"drawn": rows.sample(hidden)} if item.params.decode is not None else {}


def _nothing(item: CallItem, hidden: Tensor) -> dict:
    return {}
