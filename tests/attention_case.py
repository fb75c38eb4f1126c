"""One prompt group through one attention layer, twice: by the package's calls and by dense float64 attention.

A case captures a prefix chunk by chunk, replays packs of branches against the stored K, V and walks the chunks back,
exactly as a training step does but with random q, k, v and dout in place of a model. Both ways return the same
named tensors in global order, so that a case run on several ranks is summed over them and compared as it is.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_longstraw.context_parallel.layout import SequenceSlice, plan_chunks, slice_sequence
from megatron_longstraw.prefix.attention import BranchAttention
from megatron_longstraw.prefix.microbatch import MicroBatch
from megatron_longstraw.prefix.storage import Storage
from megatron_longstraw.prefix.store import PrefixStore
from tests.oracles.dense_attention import attention_after_prefix
from tests.oracles.rounded import straight_through
from tests.tolerances import assert_as_good_as, assert_close

LAYER = 1


@dataclass(frozen=True)
class AttentionCase:
    prefix_tokens: int = 23
    chunk_tokens: int = 8
    block_tokens: int = 5
    packs: tuple[int, ...] = (6, 3)
    """Rows of each micro-batch of branches."""
    num_prompts: int = 1
    branches: int = 2
    """Branches of each prompt in every micro-batch."""
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    scale: float = 0.3
    walked_back: int | None = None
    """Chunks that get a backward, counted from the end; None: all."""
    keep_attention: bool = False
    forwards_first: bool = False
    """All forwards before the first backward, as a pipeline may have it."""
    multiple: int = 1
    dtype: torch.dtype = torch.float64
    storage: Storage = Storage()

    @property
    def first_token_walked_back(self) -> int:
        num_chunks = -(-self.prefix_tokens // self.chunk_tokens)
        skipped = num_chunks - (num_chunks if self.walked_back is None else min(self.walked_back, num_chunks))
        return min(skipped * self.chunk_tokens, self.prefix_tokens)

    def tensors(self) -> dict[str, Tensor]:
        """Inputs q, k, v and incoming gradients dout of the prefix and of each pack, [tokens, batch, heads, D]."""
        generator = torch.Generator().manual_seed(7)
        parts = {"prefix": (self.prefix_tokens, self.num_prompts)}
        parts |= {f"pack{i}": (rows, self.num_prompts * self.branches) for i, rows in enumerate(self.packs)}
        made = {}
        for part, (tokens, batch) in parts.items():
            for name in ("q", "k", "v", "dout"):
                heads = self.kv_heads if name in "kv" else self.heads
                values = torch.randn(tokens, batch, heads, self.head_dim, generator=generator, dtype=torch.float64)
                made[f"{part}.{name}"] = values.to(self.dtype)
        return made


# -- the oracle ------------------------------------------------------------------------------------------------


def textbook(case: AttentionCase, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Dense attention of the whole prompt and of every branch, and autograd through both."""
    x = {name: value.to(dtype) for name, value in case.tensors().items()}
    leaves = {name: value.requires_grad_() for name, value in x.items() if not name.endswith("dout")}
    no_keys = x["prefix.k"][:0]
    stored = [straight_through(x[f"prefix.{name}"], case.storage.kv_dtype) for name in "kv"]
    result, losses = {}, {}
    if case.prefix_tokens:
        out, lse = attention_after_prefix(x["prefix.q"], *stored, no_keys, no_keys, case.scale)
        result |= {"prefix.out": out, "prefix.lse": lse}
        # Chunks that are not walked back send nothing anywhere.
        first = case.first_token_walked_back
        losses["prefix"] = (out[first:] * x["prefix.dout"][first:]).sum()
    for i in range(len(case.packs)):
        q, k, v, dout = (x[f"pack{i}.{name}"] for name in ("q", "k", "v", "dout"))
        out, lse = attention_after_prefix(q, k, v, *stored, case.scale)
        result |= {f"pack{i}.out": out, f"pack{i}.lse": lse}
        losses[f"pack{i}"] = (out * dout).sum()
    branch_losses = sum(loss for part, loss in losses.items() if part != "prefix")
    if case.prefix_tokens:
        if case.packs:
            dk, dv = torch.autograd.grad(branch_losses, (leaves["prefix.k"], leaves["prefix.v"]), retain_graph=True)
            result |= {"store.dk": dk, "store.dv": dv}
    grads = torch.autograd.grad(sum(losses.values()), list(leaves.values()), allow_unused=True)
    for name, grad in zip(leaves, grads):
        part, kind = name.split(".")
        if part != "prefix" or case.prefix_tokens:
            result[f"{part}.d{kind}"] = torch.zeros_like(leaves[name]) if grad is None else grad
    first = case.first_token_walked_back
    for name in ("prefix.dq", "prefix.dk", "prefix.dv", "store.dk", "store.dv"):
        if name in result:
            result[name] = torch.cat([torch.zeros_like(result[name][:first]), result[name][first:]])
    return {name: value.detach() for name, value in result.items()}


# -- the package -----------------------------------------------------------------------------------------------


class PackageRun:
    """The calls of one step on this rank. `results` are full-size tensors in which only this rank's rows are set."""

    def __init__(self, case: AttentionCase, group=None):
        self.case, self.group = case, group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.inputs = case.tensors()
        self.results: dict[str, Tensor] = {}
        self.plan = plan_chunks(
            case.prefix_tokens, case.chunk_tokens, cp_rank=self.rank, cp_size=self.size, multiple=case.multiple
        )
        num_chunks = self.plan.num_chunks
        self.store = PrefixStore(
            num_prompts=case.num_prompts,
            plan=self.plan,
            num_chunks_walked_back=num_chunks if case.walked_back is None else min(case.walked_back, num_chunks),
            weights_version=0,
            block_tokens=case.block_tokens,
            keep_attention=case.keep_attention,
            storage=case.storage,
        )
        self.state = self.store.layer(LAYER)

    def run(self) -> dict[str, Tensor]:
        for index in range(self.plan.num_chunks):
            self.capture(index)
        packs = [lambda i=i: self.replay(i) for i in range(len(self.case.packs))]
        walk = range(self.plan.num_chunks - 1, self.store.first_chunk_walked_back - 1, -1)
        chunks = [lambda i=i: self.walk_back(i) for i in walk]
        if self.case.forwards_first:
            packs, chunks = ([forward() for forward in forwards] for forwards in (packs, chunks))
            for backward in packs:
                backward()
            self.read_store()
            for backward in chunks:
                backward()
        else:
            for forward in packs:
                forward()()
            self.read_store()
            for forward in chunks:
                forward()()
        return self.results

    def capture(self, index: int) -> None:
        mb = self.chunk(index, appends=True)
        q, k, v, _ = self.local("prefix", mb.rows)
        with torch.no_grad():
            out, lse = BranchAttention.apply(q, k, v, mb, self.state, self.case.scale, self.group, None)
        valid = mb.valid_local_tokens
        if valid:
            self.state.append(mb.visible_tokens, k[:valid], v[:valid])
        if self.store.keeps_attention_of(index):
            self.state.keep_attention(index, out, lse)
        self._record("prefix.out", out, mb.rows)
        self._record("prefix.lse", lse, mb.rows)

    def replay(self, pack: int):
        """Forward of one pack; returns its backward."""
        rows = self.slice(self.case.prefix_tokens, self.case.packs[pack])
        mb = MicroBatch(
            rows, self.case.num_prompts, self.store, self.store.local_tokens, grad=True, head=True
        )
        return self._forward(f"pack{pack}", mb, None)

    def walk_back(self, index: int):
        """Forward of one seeded chunk; returns its backward."""
        mb = self.chunk(index, grad=True, seeded=True)
        return self._forward("prefix", mb, self.state.kept_attention(index))

    def read_store(self) -> None:
        """What the branches sent to the stored K, V."""
        if not (self.plan.num_chunks and self.case.packs):
            return
        for index in range(self.plan.num_chunks):
            rows = self.plan.chunks[index]
            taken = None
            if index >= self.store.first_chunk_walked_back:
                taken = self.state.take_grad(self.plan.local_offset(index), rows.valid_local_tokens)
            shape = (rows.local_tokens, self.case.num_prompts, self.case.kv_heads, self.case.head_dim)
            for name, position in (("store.dk", 0), ("store.dv", 1)):
                value = torch.zeros(shape, dtype=torch.float64)
                if taken is not None:
                    value[: rows.valid_local_tokens] = taken[position].permute(2, 0, 1, 3)
                self._record(name, value, rows)

    def _forward(self, part: str, mb: MicroBatch, known):
        q, k, v, dout = self.local(part, mb.rows)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = BranchAttention.apply(*leaves, mb, self.state, self.case.scale, self.group, known)
        if part != "prefix":
            self._record(f"{part}.out", out.detach(), mb.rows)
            self._record(f"{part}.lse", lse, mb.rows)

        def backward():
            out.backward(dout)
            for name, leaf in zip("qkv", leaves):
                self._record(f"{part}.d{name}", leaf.grad, mb.rows)

        return backward

    def slice(self, start: int, num_tokens: int) -> SequenceSlice:
        return slice_sequence(
            start, num_tokens, cp_rank=self.rank, cp_size=self.size, multiple=self.case.multiple
        )

    def chunk(self, index: int, **facts) -> MicroBatch:
        return MicroBatch(
            self.plan.chunks[index],
            self.case.num_prompts,
            self.store,
            self.plan.local_offset(index),
            chunk_index=index,
            **facts,
        )

    def local(self, part: str, rows: SequenceSlice) -> list[Tensor]:
        """This rank's rows; pads hold large garbage (dout: zero), so that any use of a pad shows."""
        offset = rows.start if part == "prefix" else 0
        begin = offset + rows.cp_rank * rows.local_tokens
        local = []
        for name in ("q", "k", "v", "dout"):
            source = self.inputs[f"{part}.{name}"]
            own = source[begin : begin + rows.valid_local_tokens]
            pads = torch.full((rows.local_tokens - len(own), *source.shape[1:]), 3.0, dtype=source.dtype)
            local.append(torch.cat([own, torch.zeros_like(pads) if name == "dout" else pads]))
        return local

    def _record(self, name: str, local: Tensor, rows: SequenceSlice) -> None:
        part = "prefix" if name.startswith(("prefix", "store")) else name.split(".")[0]
        offset = rows.start if part == "prefix" else 0
        num_tokens = len(self.inputs[f"{part}.q"])
        if name not in self.results:
            self.results[name] = torch.zeros((num_tokens, *local.shape[1:]), dtype=local.dtype)
        begin = offset + rows.cp_rank * rows.local_tokens
        valid = rows.valid_local_tokens
        self.results[name][begin : begin + valid] = local[:valid]


def run_package(case: AttentionCase, group=None) -> dict[str, Tensor]:
    return PackageRun(case, group).run()


def check(case: AttentionCase, actual: dict[str, Tensor]) -> None:
    """Outputs, lse and every gradient of `actual` against the oracle."""
    truth = textbook(case)
    for name in ("prefix.dq", "prefix.dk", "prefix.dv"):
        if name in truth and name not in actual:  # frozen: no chunk ran backward
            assert case.walked_back == 0
            truth.pop(name)
    values = {name for name in truth if name.endswith((".out", ".lse"))}
    for quantity, names in (("value", values), ("gradient", truth.keys() - values)):
        own, expected = ({name: table[name] for name in names} for table in (actual, truth))
        assert actual.keys() == truth.keys()
        if case.dtype == torch.bfloat16:
            rival = textbook(case, torch.bfloat16)
            assert_as_good_as(own, {name: rival[name] for name in names}, expected)
        else:
            assert_close(own, expected, case.dtype, quantity)


def variants(cases: dict[str, AttentionCase], *dtypes: torch.dtype) -> dict[str, AttentionCase]:
    """Every case in every dtype."""
    return {
        f"{name}-{str(dtype).removeprefix('torch.')}": replace(case, dtype=dtype)
        for name, case in cases.items()
        for dtype in dtypes
    }
