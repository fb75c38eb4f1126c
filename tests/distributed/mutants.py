"""The mistakes that would train silently, each as a change to the running package in one worker process."""
from __future__ import annotations

from functools import partial, partialmethod

from megatron_longstraw.mcore import calls, core_attention
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.prefix import attention
from megatron_longstraw.prefix.microbatch import MicroBatch
from megatron_longstraw.prefix.store import PrefixStore


def apply(name: str) -> None:
    """Break the package in this process. Raises KeyError for an unknown name."""
    {
        "ascending prefix backward": _ascending,
        "no seed": _no_seed,
        "seed at forward time": _seed_at_forward_time,
        "finalized twice": _finalized_twice,
        "last chunk not walked back": _last_chunk_not_walked_back,
        "pads stored": _pads_stored,
    }[name]()


def _ascending() -> None:
    calls.reversed = lambda walked_back: walked_back  # shadows the builtin in that module only


def _no_seed() -> None:
    attention._add_seed = lambda *args: None


def _seed_at_forward_time() -> None:
    """What the store holds when the chunk runs forward: right on one rank, incomplete under a pipeline."""
    add_seed, snapshots = attention._add_seed, {}

    class Early:
        def __init__(self, seed):
            self.seed = seed

        def take_grad(self, begin, num_tokens):
            return self.seed

    def early(real, self, *args):
        (mb,) = (fact for fact in args if isinstance(fact, MicroBatch))
        if mb.seeded:
            state = mb.store.layer(self.layer_number)
            seed = state.take_grad(mb.visible_tokens, mb.valid_local_tokens)
            snapshots[id(mb), id(state)] = None if seed is None else tuple(part.clone() for part in seed)
        return real(self, *args)

    for name in ("_attend", "store_only"):
        real = getattr(core_attention.BranchCoreAttention, name)
        setattr(core_attention.BranchCoreAttention, name, partialmethod(partial(early, real)))
    attention._add_seed = lambda dk, dv, mb, state: add_seed(dk, dv, mb, Early(snapshots[id(mb), id(state)]))


def _finalized_twice() -> None:
    """As if every call finalized by itself: the first call's gradients are summed over ranks again."""
    real = calls.prefix_backward

    def prefix_backward(policy: Policy, *args):
        policy.finalize_gradients()
        return real(policy, *args)

    import check_gradients

    check_gradients.prefix_backward = prefix_backward


def _last_chunk_not_walked_back() -> None:
    PrefixStore.first_chunk_walked_back = property(lambda self: min(1, self.plan.num_chunks))


def _pads_stored() -> None:
    """Store every row of a chunk's last slice, pads included."""
    MicroBatch.valid_local_tokens = property(lambda self: self.rows.local_tokens)
    PrefixStore.local_tokens = property(
        lambda self: sum(chunk.local_tokens for chunk in self.plan.chunks)
    )
