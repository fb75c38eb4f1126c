"""The rules of a family's table: which block of which Hugging Face tensor is which block of a local parameter.

A rule answers for one parameter of the whole model, cut any way over tensor parallel ranks; read in one direction it
imports, in the other it exports. Shapes are spelled with the names of `dimensions`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, NamedTuple, Protocol

from megatron_longstraw.config import ModelConfig


class Shard(Protocol):
    """What a rule needs to know of a local parameter (mcore/parameters.py, ParameterShard)."""

    partition_dim: int | None
    rank: int
    local_shape: tuple[int, ...]


class Piece(NamedTuple):
    """A block of a Hugging Face tensor and the same numbers' place in a local parameter."""

    name: str
    source: tuple[slice, ...]
    target: tuple[slice, ...]


def dimensions(model: ModelConfig) -> dict[str, int]:
    """Sizes by the names that shapes are spelled with (model: resolved)."""
    return {
        "vocab": model.vocab_size,
        "hidden": model.hidden_size,
        "ffn": model.ffn_hidden_size,
        "heads": model.num_attention_heads * model.kv_channels,
        "groups": model.num_query_groups * model.kv_channels,
        "head": model.kv_channels,
        "experts": model.num_experts or 0,
        "moe_ffn": model.moe_ffn_hidden_size or 0,
    }


@dataclass(frozen=True)
class Rule:
    """`ours` is Megatron's name in the whole model; {layer} and {expert} stand for numbers in both names."""

    ours: str
    theirs: tuple[str, ...]
    shape: tuple[str, ...]
    """Of the first tensor."""

    def shapes(self, dims: dict[str, int]) -> list[tuple[int, ...]]:
        """One per tensor."""
        return [tuple(dims[name] for name in self.shape)] * len(self.theirs)

    def pieces(self, names: tuple[str, ...], shard: Shard, model: ModelConfig) -> Iterator[Piece]:
        raise NotImplementedError

    def numbered(self, names: tuple[str, ...], layer: int, expert: int) -> tuple[str, ...]:
        return tuple(name.format(layer=layer, expert=expert) for name in names)


class Whole(Rule):
    """One tensor, one parameter."""

    def __init__(self, ours: str, theirs: str, *shape: str):
        super().__init__(ours, (theirs,), shape)

    def pieces(self, names, shard, model):
        (full,) = self.shapes(dimensions(model))
        source, target = [slice(0, size) for size in full], [slice(0, size) for size in full]
        if shard.partition_dim is not None:
            dim, length = shard.partition_dim, shard.local_shape[shard.partition_dim]
            begin = min(shard.rank * length, full[dim])
            end = min(begin + length, full[dim])  # past it is padded vocabulary
            source[dim], target[dim] = slice(begin, end), slice(0, end - begin)
        if all(part.stop > part.start for part in source):
            yield Piece(names[0], tuple(source), tuple(target))


class Stacked(Rule):
    """Tensors of one shape stacked by rows; a rank holds its slice of each (gate and up of a SwiGLU)."""

    def __init__(self, ours: str, theirs: tuple[str, ...], *shape: str):
        super().__init__(ours, theirs, shape)

    def pieces(self, names, shard, model):
        length = shard.local_shape[0] // len(names)
        begin = shard.rank * length if shard.partition_dim is not None else 0
        rest = tuple(slice(0, size) for size in shard.local_shape[1:])
        for number, name in enumerate(names):
            yield Piece(
                name,
                (slice(begin, begin + length), *rest),
                (slice(number * length, (number + 1) * length), *rest),
            )


class QueryKeyValue(Rule):
    """Three projections in Megatron's order: for each group its query heads, its key head, its value head."""

    def __init__(self, ours: str, theirs: tuple[str, str, str], *rest: str):
        super().__init__(ours, theirs, rest)

    def shapes(self, dims):
        rest = tuple(dims[name] for name in self.shape)
        return [(dims["heads"], *rest), (dims["groups"], *rest), (dims["groups"], *rest)]

    def pieces(self, names, shard, model):
        head = model.kv_channels
        rows = (model.num_attention_heads // model.num_query_groups * head, head, head)
        per_rank = shard.local_shape[0] // sum(rows)
        rest = tuple(slice(0, size) for size in shard.local_shape[1:])
        first = shard.rank * per_rank if shard.partition_dim is not None else 0
        for local in range(per_rank):
            begin = local * sum(rows)
            for name, count in zip(names, rows):
                source = (first + local) * count
                yield Piece(name, (slice(source, source + count), *rest), (slice(begin, begin + count), *rest))
                begin += count
