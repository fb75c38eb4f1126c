"""Process groups: Megatron-Core's own, made once and handed around explicitly."""
from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_longstraw import config as cfg
from megatron_longstraw.mcore import cpu_runtime


@dataclass(frozen=True)
class Layout:
    """This rank's place in the (tp, cp, pp, dp) grid, the groups, and the device."""

    groups: ProcessGroupCollection
    cell: dist.ProcessGroup
    """tp x cp x pp ranks that work on the same prompts (one data-parallel replica)."""
    device: torch.device
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    ep_size: int
    sequence_parallel: bool

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def row_multiple(self) -> int:
        """Rows of a rank must be a multiple of this (sequence parallelism splits them over tp)."""
        return self.tp_size if self.sequence_parallel else 1

    @property
    def is_cell_leader(self) -> bool:
        return (self.tp_rank, self.cp_rank, self.pp_rank) == (0, 0, 0)

    def describe(self) -> str:
        sizes = (("tp", self.tp_size), ("cp", self.cp_size), ("pp", self.pp_size), ("dp", self.dp_size), ("ep", self.ep_size))
        text = " x ".join(f"{name}{size}" for name, size in sizes if size > 1) or "1 rank"
        return text + (" + sp" if self.sequence_parallel else "")


def initialize(config: cfg.Config) -> Layout:
    """Join the process group that torchrun describes (a single process without it) and build Megatron's groups.

    A second call in one process replaces the first one's groups: its Layout must not be used any more.

    Raises:
        ConfigError: the layout does not fit the world size.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    cfg.check(config, world_size)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    device = _device()
    if not dist.is_initialized():
        _default_rendezvous()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    parallel = config.parallel
    cpu_runtime.install()
    _leave_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.num_virtual_stages_per_pipeline_rank,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size(parallel),
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
    )
    # Dropout is refused, so every rank may share one stream; Megatron only insists on having a tracker.
    model_parallel_cuda_manual_seed(config.run.seed, force_reset_rng=True)
    return _layout(config, device, timeout)


def expert_tensor_parallel_size(parallel: cfg.ParallelConfig) -> int:
    """Experts are whole under expert parallelism (cut ones would gather unequal token counts over tp, which gloo
    cannot) and cut over tp without it: Megatron 0.16.1 reduces the gradient of whole experts over tp only when
    expert_model_parallel_size > 1 (tensor_parallel/layers.py sets `allreduce` by it), and is silently wrong else."""
    return 1 if parallel.expert_model_parallel_size > 1 else parallel.tensor_model_parallel_size


def leave() -> None:
    """Close all groups of this process; another `initialize` may follow."""
    if dist.is_initialized():
        _leave_groups()
        dist.destroy_process_group()


def _leave_groups() -> None:
    """Close the groups of an earlier layout in this process. Megatron only forgets them
    (parallel_state.destroy_model_parallel), and every open gloo group keeps threads polling."""
    if not parallel_state._global_process_group_list:
        return
    for group in parallel_state._global_process_group_list:
        if group is not None:  # None stands for the default group, which stays
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    # A group's sockets close with its last reference, which may sit in a cycle, as behind a caught exception.
    gc.collect()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def _default_rendezvous() -> None:
    """A plain `python` start is a world of one."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def _layout(config: cfg.Config, device: torch.device, timeout: timedelta) -> Layout:
    state = parallel_state
    return Layout(
        groups=ProcessGroupCollection.use_mpu_process_groups(),
        cell=_cell_group(timeout),
        device=device,
        tp_rank=state.get_tensor_model_parallel_rank(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        pp_rank=state.get_pipeline_model_parallel_rank(),
        pp_size=state.get_pipeline_model_parallel_world_size(),
        cp_rank=state.get_context_parallel_rank(),
        cp_size=state.get_context_parallel_world_size(),
        dp_rank=state.get_data_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        ep_size=state.get_expert_model_parallel_world_size(),
        sequence_parallel=config.parallel.sequence_parallel,
    )


def _cell_group(timeout: timedelta) -> dist.ProcessGroup:
    """Megatron has no group of all ranks of one replica with cp inside, so make it: same dp rank, same cell."""
    places = [None] * dist.get_world_size()
    dist.all_gather_object(places, parallel_state.get_data_parallel_rank())
    groups = {}
    for dp_rank in sorted(set(places)):
        ranks = [rank for rank, place in enumerate(places) if place == dp_rank]
        groups[dp_rank] = parallel_state.create_group(ranks, timeout=timeout, group_desc="LONGSTRAW_CELL_GROUP")
    return groups[parallel_state.get_data_parallel_rank()]
