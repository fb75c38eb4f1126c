"""Megatron's optimizer and learning-rate schedule over a policy."""
from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Iterator

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_longstraw.config import Config
from megatron_longstraw.mcore import cpu_runtime
from megatron_longstraw.mcore.parameters import named_shards
from megatron_longstraw.mcore.policy import Policy


@dataclass(frozen=True)
class StepResult:
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    lr: float
    """Learning rate the step used."""


class PolicyOptimizer:
    """AdamW with float32 master weights; clips by the global norm; counts one version of the weights per step.

    With `optimizer_cpu_offload` master weights, averages and a float32 copy of the gradients are in host memory (16
    bytes per parameter of this rank's share), and the update runs there: Megatron's HybridDeviceOptimizer, in the only
    combination in which it keeps no master weights on the device (distributed and "precision aware")."""

    def __init__(self, policy: Policy):
        self.policy = policy
        options = policy.config.optimizer
        self._scope = partial(cpu_runtime.tensor_scope, host_copies=options.optimizer_cpu_offload)
        cpu_runtime.install()
        with self._scope():
            self._optimizer = get_megatron_optimizer(_megatron_options(policy.config), policy.ddp)
            self._prepare_state()
        config = policy.config
        decay_steps = options.lr_decay_iters or config.run.train_iters * config.algorithm.updates_per_step
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
        with self._scope():
            done, grad_norm, _ = self._optimizer.step()
        assert done, "Megatron refused a step without a loss scaler"
        self.schedule.step(increment=1)
        self.policy.weights_changed()
        return StepResult(float(grad_norm), lr)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def state(self, model_state: dict[str, Any], metadata: dict[str, Any], loading: bool) -> dict[str, Any]:
        """Moments, master weights and schedule as a sharded state over that of the model."""
        with self._scope():
            optimizer = self._optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=metadata)
        if not loading:
            optimizer = _without_classes(optimizer)
        return {"optimizer": optimizer, "opt_param_scheduler": self.schedule.state_dict()}

    def load_state(self, state: dict[str, Any], plain: Any) -> None:
        """Continue where a loaded `state` stopped.

        Args:
            plain: `plain_parts` of the state that was asked for. What is no tensor comes from it: the configuration's
                learning rates, and groups of parameters as this layout has them (expert parallelism splits them).
        """
        num_steps = state["opt_param_scheduler"]["num_steps"]
        with self._scope():
            self._optimizer.load_state_dict(_with_steps(_overlay(plain, state["optimizer"]), num_steps))
        self._own_steps()
        self.schedule.num_steps = 0
        self.schedule.step(increment=num_steps)
        self.policy.weights_changed()

    def _inner(self) -> Iterator[Any]:
        """Megatron's optimizers of one torch optimizer each."""
        chained = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        yield from (optimizer for optimizer in chained if not getattr(optimizer, "is_stub_optimizer", False))

    def _prepare_state(self) -> None:
        """Give torch's AdamW the state of no steps at once, which it would make in its first. Megatron's distributed
        optimizer cannot save without (distrib_optimizer.py:641), nor load the step count that torch keeps with each
        parameter (:940)."""
        for optimizer in self._inner():
            for adam in _torch_adams(optimizer.optimizer):
                for group in adam.param_groups:
                    for parameter in group["params"]:
                        adam.state[parameter] = {
                            "step": torch.tensor(0.0),
                            "exp_avg": torch.zeros_like(parameter),
                            "exp_avg_sq": torch.zeros_like(parameter),
                        }
            if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
                optimizer.optimizer._sync_sub_optimizers_state_to_hdo()
            elif isinstance(optimizer, DistributedOptimizer) and isinstance(optimizer.optimizer, torch.optim.AdamW):
                optimizer._set_main_param_and_optimizer_states = partial(_set_without_step, optimizer)

    def _own_steps(self) -> None:
        """A step count for each parameter: Megatron hands all of them one tensor (distrib_optimizer.py:821-825),
        which torch's AdamW would advance once per parameter, and the bias correction would be silently wrong."""
        for optimizer in self._inner():
            for adam in _torch_adams(optimizer.optimizer):
                for values in adam.state.values():
                    values["step"] = values["step"].clone()


def _megatron_options(config: Config) -> OptimizerConfig:
    options = config.optimizer
    result = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        clip_grad=options.clip_grad,
        bf16=config.model.bf16,
        params_dtype=torch.bfloat16 if config.model.bf16 else torch.float32,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        optimizer_cpu_offload=options.optimizer_cpu_offload,
        optimizer_offload_fraction=1.0,
    )
    if options.optimizer_cpu_offload:
        # Set afterwards: its checks compare the version of Transformer Engine, which may be absent
        # (optimizer_config.py:383).
        result.use_precision_aware_optimizer = result.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        result.store_param_remainders = False
    return result


def _torch_adams(optimizer: torch.optim.Optimizer) -> list[torch.optim.AdamW]:
    """Those of torch in an optimizer. Transformer Engine's and apex's fused Adam count steps per group."""
    parts = optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]
    return [part for part in parts if isinstance(part, torch.optim.AdamW)]


def plain_parts(state: Any) -> Any:
    """A sharded state with `LOADED` in place of everything that comes from the checkpoint's tensors."""
    if isinstance(state, ShardedBase):
        return LOADED
    if isinstance(state, LocalNonpersistentObject):
        return state.unwrap()
    if isinstance(state, dict):
        return {key: plain_parts(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(plain_parts(value) for value in state)
    return state


LOADED = object()


def _overlay(plain: Any, loaded: Any) -> Any:
    """`plain` with the values of `loaded` where it says `LOADED`."""
    if plain is LOADED:
        return loaded
    if isinstance(plain, dict):
        return {key: _overlay(value, _child(loaded, key)) for key, value in plain.items()}
    if isinstance(plain, (list, tuple)):
        return type(plain)(_overlay(value, _child(loaded, index)) for index, value in enumerate(plain))
    return plain


def _child(loaded: Any, key: Any) -> Any:
    known = isinstance(loaded, dict) and key in loaded or isinstance(loaded, (list, tuple)) and key < len(loaded)
    return loaded[key] if known else None


def _without_classes(state: Any) -> Any:
    """A state that loads without unpickling code: HybridDeviceOptimizer has optimizer classes in its groups."""
    if isinstance(state, dict):
        return {key: _without_classes(value) for key, value in state.items() if not isinstance(value, type)}
    if isinstance(state, (list, tuple)):
        return type(state)(_without_classes(value) for value in state)
    return state


def _with_steps(state: Any, num_steps: int) -> Any:
    """The state with this count where Megatron keeps that of torch's AdamW: beside the moments, or in the groups of the
    distributed optimizer."""
    if not isinstance(state, dict):
        return state
    result = {key: _with_steps(value, num_steps) for key, value in state.items()}
    if "param_groups" in state and "state" in state:
        result["state"] = {**state["state"], "common_step": torch.tensor(float(num_steps))}
    elif "param_groups" in state:
        result["param_groups"] = [group | ({"step": num_steps} if "step" in group else {}) for group in state["param_groups"]]
    return result


def _set_without_step(optimizer: DistributedOptimizer, model_parameter: torch.nn.Parameter, tensors: dict) -> None:
    """`DistributedOptimizer._set_main_param_and_optimizer_states` (distrib_optimizer.py:911-941) for torch's AdamW."""
    group, order = optimizer.model_param_group_index_map[model_parameter]
    main = optimizer.optimizer.param_groups[group]["params"][order]
    for name, place in {"param": main, **optimizer.optimizer.state[main]}.items():
        if name != "step":
            place.copy_(tensors[name])


def gradients_finite(policy: Policy) -> bool:
    """Whether every finalized gradient on every rank is finite (all ranks agree)."""
    finite = torch.ones((), device=policy.layout.device)
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            finite *= torch.isfinite(parameter.main_grad).all()
    dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite)


def nonfinite_gradients(policy: Policy) -> list[str]:
    """Names, in the whole model, of this rank's parameters whose gradient is not finite."""
    shards = named_shards(policy.chunks, policy.config.model)
    return [shard.name for shard, parameter in shards if not torch.isfinite(parameter.main_grad).all()]
