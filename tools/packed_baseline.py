"""One prompt and its G responses as ONE packed row under plain autograd: the shared-prefix training step of
Prefix Grouper (arXiv 2506.05433), an opponent for tools/bench_step.py.

    row        [prompt (P tokens); r_1[:-1]; ..; r_G[:-1]]
    positions  0 .. P-1, then every response from P on
    attention  causal square of the prompt; one rectangle of all response rows onto the prompt; causal square of
               each response

The prompt runs once per group here too, so what is left against branch replay is memory (the graph covers the
whole row), and that activation recompute runs attention forward again. The same model, kernels and head as the
package; its attention, positions and loop are its own. The last prompt token's hidden state is scored once per
response (G - 1 more head rows than needed).
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_longstraw.attention.kernels import attend, attend_backward
from megatron_longstraw.attention.merge import AttentionAccumulator
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.types import PromptGroup


@dataclass(frozen=True)
class PackedRow:
    """Where the tokens of a packed row sit. All responses are equally long."""

    prompt_tokens: int
    num_responses: int
    response_tokens: int

    @property
    def branch_rows(self) -> int:
        """Rows of one response: its last token is no input."""
        return self.response_tokens - 1

    @property
    def num_rows(self) -> int:
        return self.prompt_tokens + self.num_responses * self.branch_rows

    def positions(self) -> Tensor:
        branch = torch.arange(self.prompt_tokens, self.prompt_tokens + self.branch_rows)
        return torch.cat([torch.arange(self.prompt_tokens), branch.repeat(self.num_responses)])

    def scored_rows(self) -> Tensor:
        """int64 [G, R]: the row whose logits predict each response token."""
        first = torch.full((self.num_responses, 1), self.prompt_tokens - 1)
        own = torch.arange(self.prompt_tokens, self.num_rows).view(self.num_responses, self.branch_rows)
        return torch.cat([first, own], dim=1)


class PackedModel:
    """`policy`'s model, turned into one that takes packed rows of this shape and no other input."""

    def __init__(self, policy: Policy, row: PackedRow):
        self.policy, self.row = policy, row
        (chunk,) = policy.chunks
        for layer in chunk.decoder.layers:
            ours = layer.self_attention.core_attention
            layer.self_attention.core_attention = PackedCoreAttention(ours.config, row, ours.scale)
        chunk.rotary_pos_emb = PackedRotary(chunk.rotary_pos_emb.inner, row)

    def accumulate_gradients(self, group: PromptGroup, weights: np.ndarray) -> None:
        """Add the gradient of sum(weights * logprobs) to `main_grad`. weights: float32 [G, R]."""
        policy, row = self.policy, self.row
        responses = torch.from_numpy(np.stack([branch.response_ids for branch in group.branches]))
        ids = torch.cat([torch.from_numpy(group.prompt_ids), responses[:, :-1].reshape(-1)])
        device = policy.layout.device
        with policy.meter.measure("packed", row.num_rows), policy.headless(), policy.no_sync():
            (model,) = policy.ddp
            hidden = policy.head.full_rows(model(ids[None].to(device), None, None))[:, 0]
            scored = hidden[row.scored_rows().reshape(-1).to(device)]
            logprobs, _ = policy.head.logprobs(scored, responses.reshape(-1).to(device))
            (logprobs * torch.from_numpy(weights).reshape(-1).to(device)).sum().backward()


class PackedRotary(torch.nn.Module):
    """Rotary phases of a packed row's positions, from the stock module."""

    def __init__(self, inner: torch.nn.Module, row: PackedRow):
        super().__init__()
        self.inner, self.row = inner, row

    def get_rotary_seq_len(self, *args, **kwargs) -> int:
        return self.row.prompt_tokens + self.row.branch_rows

    def forward(self, num_positions: int, packed_seq: bool = False, cp_group=None):
        phases = self.inner.get_emb(num_positions, 0)
        if isinstance(phases, tuple):  # YaRN: phases and a factor
            return phases[0][self.row.positions().to(phases[0].device)], *phases[1:]
        return phases[self.row.positions().to(phases.device)]


class PackedCoreAttention(MegatronModule):
    """Takes q [S, 1, N, D] and unexpanded k, v [S, 1, K, D] of a packed row; returns [S, 1, N * D]."""

    def __init__(self, config, row: PackedRow, scale: float):
        super().__init__(config=config)
        self.row, self.scale = row, scale

    def forward(self, query, key, value, attention_mask=None, **_unused):
        assert query.shape[0] == self.row.num_rows, f"{query.shape[0]} rows for a packed row of {self.row.num_rows}"
        return PackedAttention.apply(query, key, value, self.row, self.scale).flatten(2)


class PackedAttention(torch.autograd.Function):
    """Attention under the packed row's mask, block by block; gradient to q, k and v."""

    @staticmethod
    def forward(ctx, q, k, v, row: PackedRow, scale: float):
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        prompt, branches = slice(0, row.prompt_tokens), slice(row.prompt_tokens, row.num_rows)
        out_p, lse_p = attend(*(_one_row(x[prompt]) for x in (q, k, v)), causal=True, scale=scale)
        out[prompt], lse[prompt] = _rows(out_p), _rows(lse_p)
        if row.branch_rows:
            merged = AttentionAccumulator(q[branches])
            every = slice(0, row.num_rows - row.prompt_tokens)
            onto_prompt = attend(_one_row(q[branches]), _one_row(k[prompt]), _one_row(v[prompt]), causal=False, scale=scale)
            merged.add(every, *(_rows(x) for x in onto_prompt))
            own = attend(*(_per_branch(x[branches], row) for x in (q, k, v)), causal=True, scale=scale)
            merged.add(every, *(_rows(x) for x in own))
            out[branches], lse[branches] = merged.out_SBND, merged.lse_SBN
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.facts = row, scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        row, scale = ctx.facts
        prompt, branches = slice(0, row.prompt_tokens), slice(row.prompt_tokens, row.num_rows)
        grads = tuple(torch.empty_like(x) for x in (q, k, v))
        square = attend_backward(*(_one_row(x[prompt]) for x in (dout, q, k, v, out, lse)), causal=True, scale=scale)
        for grad, part in zip(grads, square):
            grad[prompt] = _rows(part)
        if row.branch_rows:
            upper = [x[branches] for x in (dout, q, k, v, out, lse)]
            own = attend_backward(*(_per_branch(x, row) for x in upper), causal=True, scale=scale)
            for grad, part in zip(grads, own):
                grad[branches] = _rows(part)
            dout_b, q_b, _, _, out_b, lse_b = (_one_row(x) for x in upper)
            dq, dk, dv = attend_backward(
                dout_b, q_b, _one_row(k[prompt]), _one_row(v[prompt]), out_b, lse_b, causal=False, scale=scale
            )
            for grad, rows, part in zip(grads, (branches, prompt, prompt), (dq, dk, dv)):
                grad[rows] += _rows(part)
        return *grads, None, None


def _one_row(x_S1ND: Tensor) -> Tensor:
    """[S, 1, N, ...] -> [1, N, S, ...] as a view: what the kernels take."""
    return x_S1ND.permute(1, 2, 0, *range(3, x_S1ND.dim()))


def _per_branch(x_S1ND: Tensor, row: PackedRow) -> Tensor:
    """Response rows [G * T, 1, N, ...] -> [G, N, T, ...], a batch of equally long responses, as a view."""
    x = x_S1ND.reshape(row.num_responses, row.branch_rows, *x_S1ND.shape[2:])
    return x.transpose(1, 2)


def _rows(x_bNSD: Tensor) -> Tensor:
    """[b, N, S, ...] -> [b * S, 1, N, ...]: back to rows of the packed row."""
    return x_bNSD.transpose(1, 2).flatten(0, 1).unsqueeze(1)
