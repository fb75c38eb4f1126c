"""Exact branch-replay gradients for people with a loop of their own.

    trainer = BranchReplay(config)                  # model and process groups of a configuration
    metrics = trainer.gradients([group, ...])       # prompts with scored responses -> parameter.grad
    optimizer.step(); trainer.weights_changed()     # any optimizer; say that the weights moved
"""
from __future__ import annotations

from typing import Iterator

import torch
import torch.distributed as dist

from megatron_longstraw.config import Config, ConfigError
from megatron_longstraw.convert.adopt import check_window, open_folder, with_model_of
from megatron_longstraw.data.task import check_prompts
from megatron_longstraw.gradients import Work, accumulate_gradients, advantages_of, has_signal, in_step
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.calls import capture, score
from megatron_longstraw.mcore.packing import batch_prompts
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.objectives.policy_loss import PolicyObjective
from megatron_longstraw.planner.chunks import with_chunk_tokens
from megatron_longstraw.types import PromptGroup


class BranchReplay:
    """A policy and its objective.

    Raises:
        ConfigError: the configuration cannot be run, or not with this many ranks.
        FolderError: `hf_checkpoint` cannot be used.
    """

    def __init__(self, config: Config):
        folder = open_folder(config)
        config = with_model_of(config, folder).resolve()
        check_window(config, folder)
        layout = parallel.initialize(config)
        config = with_chunk_tokens(config, dist.get_world_size())
        self.policy = Policy(config, layout, folder)
        algorithm = config.algorithm
        self.objective = PolicyObjective(algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.loss_agg_mode)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """This rank's parameters."""
        for chunk in self.policy.chunks:
            yield from chunk.parameters()

    def gradients(self, groups: list[PromptGroup]) -> dict[str, float]:
        """Set `parameter.grad` to the gradient of the policy loss over `groups` and all data-parallel ranks.

        Args:
            groups: this data-parallel rank's prompts, each branch with its `reward` (None: not scored, trains
                nothing). Ranks of one replica (tp, cp, pp) pass the same groups.

        The gradient is that of the weights that produced the responses (ratio 1) and is complete on return: summed
        over dp and cp once, in float32 (`main_grad`), cast to the parameter's dtype.

        Returns:
            Metrics of this rank's groups, by verl's names. Without any signal (no variance in any group, all
            masked) the gradient is zero and "training/no_signal_steps" is 1.

        Raises:
            ConfigError: a group without branches, ids outside the vocabulary, or a prompt or response over its limit.
            StaleStoreError: the weights changed since the last call and `weights_changed` was not called.
        """
        config = self.policy.config
        empty = [f"group {g.group_id!r} has no responses: a group of size 0 has nothing to learn from" for g in groups if not g.branches]
        if empty:
            raise ConfigError(empty)
        check_prompts(groups, config.model.vocab_size, config.rollout)
        batches = in_step(self.policy, batch_prompts(groups, config.prefix.prompts_per_microbatch))
        work = [Work(batch, advantages_of(batch, config.algorithm)) for batch in batches]
        if has_signal(self.policy, work):
            metrics = accumulate_gradients(self.policy, work, self.objective).to_means()
        else:
            self.policy.zero_grad()
            metrics = {"training/no_signal_steps": 1.0}
        for parameter in self.parameters():
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        return metrics

    def logprobs(self, groups: list[PromptGroup]) -> list[list]:
        """float32 log-probs [R] of every response under the current weights, by group and branch."""
        batches = batch_prompts(groups, 1)
        scored = {}
        for batch in batches:
            store = capture(self.policy, batch, walk_back=False)
            scored |= {(id(batch.groups[0]), branch): values for (_, branch), values in score(self.policy, store, batch)[0].items()}
            store.release()
        return [[scored.get((id(group), i), []) for i in range(len(group.branches))] for group in groups]

    def weights_changed(self) -> None:
        """Say that the weights moved: prefix states captured before are stale. Forgetting it is detected."""
        self.policy.weights_changed()
