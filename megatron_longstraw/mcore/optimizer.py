"""Megatron's optimizer and learning-rate schedule over a policy."""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_longstraw.mcore import cpu_runtime
from megatron_longstraw.mcore.policy import Policy


@dataclass(frozen=True)
class StepResult:
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    lr: float
    """Learning rate the step used."""


class PolicyOptimizer:
    """AdamW with float32 master weights; clips by the global norm; counts one version of the weights per step."""

    def __init__(self, policy: Policy):
        self.policy = policy
        options, config = policy.config.optimizer, policy.config
        dtype = torch.bfloat16 if config.model.bf16 else torch.float32
        cpu_runtime.install()
        with cpu_runtime.tensor_scope():
            self._optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=options.lr,
                    min_lr=options.min_lr,
                    weight_decay=options.weight_decay,
                    adam_beta1=options.adam_beta1,
                    adam_beta2=options.adam_beta2,
                    adam_eps=options.adam_eps,
                    clip_grad=options.clip_grad,
                    bf16=config.model.bf16,
                    params_dtype=dtype,
                    use_distributed_optimizer=config.parallel.use_distributed_optimizer,
                ),
                policy.ddp,
            )
        decay_steps = options.lr_decay_iters or config.run.train_iters
        self.schedule = OptimizerParamScheduler(
            self._optimizer,
            init_lr=0.0,
            max_lr=options.lr,
            min_lr=options.min_lr,
            lr_warmup_steps=options.lr_warmup_iters,
            lr_decay_steps=max(decay_steps, options.lr_warmup_iters + 1),
            lr_decay_style=options.lr_decay_style,
            start_wd=options.weight_decay,
            end_wd=options.weight_decay,
            wd_incr_steps=max(decay_steps, 1),
            wd_incr_style="constant",
        )

    @property
    def lr(self) -> float:
        return self._optimizer.param_groups[0]["lr"]

    def step(self) -> StepResult:
        """Clip, update, advance the schedule. Gradients must be finalized (and finite, see `gradients_finite`)."""
        lr = self.lr
        with cpu_runtime.tensor_scope():
            done, grad_norm, _ = self._optimizer.step()
        assert done, "Megatron refused a step without a loss scaler"
        self.schedule.step(increment=1)
        self.policy.weights_changed()
        return StepResult(float(grad_norm), lr)


def gradients_finite(policy: Policy) -> bool:
    """Whether every finalized gradient on every rank is finite (all ranks agree)."""
    finite = torch.ones((), device=policy.layout.device)
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            finite *= torch.isfinite(parameter.main_grad).all()
    dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite)
