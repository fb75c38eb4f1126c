"""The prefix store of one capture: the state of every local layer, and which weights it belongs to."""
from __future__ import annotations

from dataclasses import dataclass, field

from megatron_longstraw.context_parallel.layout import ChunkPlan
from megatron_longstraw.prefix.graphs import ChunkGraphs
from megatron_longstraw.prefix.state import TokenState
from megatron_longstraw.prefix.storage import DeviceBudget, Storage, StoredBytes


class StaleStoreError(RuntimeError):
    """A store captured under other weights than the ones about to read it."""


@dataclass
class PrefixStore:
    """State of `num_prompts` prompts of equal length on this rank (its pipeline stage, its slices).

    A store belongs to one version of the weights. `weights_version` is stamped at capture; every call that
    reads the store checks it.
    """

    num_prompts: int
    plan: ChunkPlan
    num_chunks_walked_back: int
    """The last N chunks get a prefix backward (exact: all, last:N: N, frozen: 0)."""
    weights_version: object
    block_tokens: int
    keep_attention: bool
    """Keep (out, lse) of every layer for the chunks that will be walked back (DESIGN rule 5)."""
    graphs: ChunkGraphs | None = None
    """Autograd graphs of the last chunks; None: none are kept."""
    storage: Storage = Storage()
    layers: dict[int, TokenState] = field(default_factory=dict)

    def __post_init__(self):
        self._budget = DeviceBudget(self.storage.device_bytes)

    @property
    def local_tokens(self) -> int:
        """Tokens this rank holds once the capture is complete."""
        return self.plan.local_offset(self.plan.num_chunks)

    @property
    def first_chunk_walked_back(self) -> int:
        return self.plan.num_chunks - self.num_chunks_walked_back

    def layer(self, layer_number: int) -> TokenState:
        """State of one layer (Megatron's global, 1-based layer number)."""
        if layer_number not in self.layers:
            grad_begin = self.plan.local_offset(self.first_chunk_walked_back)
            self.layers[layer_number] = TokenState(
                self.local_tokens, grad_begin, self.block_tokens, self.storage, self._budget
            )
        return self.layers[layer_number]

    def keeps_attention_of(self, chunk_index: int) -> bool:
        """Whether the chunk's (out, lse) are kept at capture: only chunks that will be walked back need them."""
        return self.keep_attention and chunk_index >= self.first_chunk_walked_back

    def check_version(self, weights_version: object) -> None:
        """Raises:
        StaleStoreError: the weights moved since the capture.
        """
        if weights_version != self.weights_version:
            raise StaleStoreError(
                f"the prefix was captured under weights version {self.weights_version} and would be read under "
                f"{weights_version}: its state would mix two models. Capture again after every optimizer step"
            )

    def release(self) -> None:
        """Free everything; the store cannot be read afterwards."""
        for state in self.layers.values():
            state.release()
        self.layers.clear()
        if self.graphs is not None:
            self.graphs.release()

    @property
    def nbytes(self) -> StoredBytes:
        graphs = StoredBytes() if self.graphs is None else StoredBytes(self.graphs.nbytes)
        return sum((state.nbytes for state in self.layers.values()), graphs)
