"""Megatron-Core 0.16.1 without a GPU: every work-around in one place, active only when there is no CUDA device.

Nothing of torch itself is changed. Each loaded `megatron.core` module sees a stand-in for the name `torch`
whose factory functions turn device="cuda" into "cpu" and whose `cuda` answers like a machine with one stream.
The rest are named below with the Megatron line they cover (paths relative to megatron/core).
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from types import ModuleType

import torch
from torch.overrides import TorchFunctionMode

_FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange", "empty_like", "zeros_like", "ones_like", "eye")


class _NoStream:
    """Stands in for torch.cuda.Stream and Event: the CPU runs everything in order.
    (transformer/moe/token_dispatcher.py:445, 871-895)"""

    def __init__(self, *args, **kwargs):
        pass

    def _nothing(self, *args, **kwargs):
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, *args):
        return self

    def query(self):
        return True


class _CudaForCpu(ModuleType):
    """`torch.cuda` as seen by megatron.core modules."""

    Stream = Event = _NoStream
    _stream = _NoStream()

    def __getattr__(self, name):
        return getattr(torch.cuda, name)

    @staticmethod
    def current_device():
        return "cpu"  # ~100 uses as device=torch.cuda.current_device(), e.g. tensor_parallel/layers.py:261

    @staticmethod
    def synchronize(*args, **kwargs):
        pass  # pipeline_parallel/p2p_communication.py:242, 398

    @classmethod
    def current_stream(cls, *args, **kwargs):
        return cls._stream

    default_stream = current_stream

    @staticmethod
    def stream(_):
        return contextlib.nullcontext()

    @staticmethod
    def get_rng_state(*args, **kwargs):
        return torch.get_rng_state()  # tensor_parallel/random.py:235

    @staticmethod
    def manual_seed(seed):
        torch.manual_seed(int(seed))


class _TorchForCpu(ModuleType):
    """`torch` as seen by megatron.core modules."""

    def __init__(self):
        super().__init__("torch")
        self.cuda = _CudaForCpu("torch.cuda")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name):
        return getattr(torch, name)


def _on_cpu(factory):
    """Covers literal device="cuda": pipeline_parallel/schedules.py:596, 983, 2138; optimizer/clip_grads.py:90-207;
    optimizer/optimizer.py:473-485, 907; optimizer/grad_scaler.py; transformer/moe/moe_utils.py:998."""

    @functools.wraps(factory)
    def create(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


class _CudaTensorMethods(TorchFunctionMode):
    """Tensor methods that name CUDA: `param.type()` answers 'torch.cuda.FloatTensor' (optimizer/optimizer.py:690,
    distrib_optimizer.py:361, 420 and clip_grads.py:167 accept nothing else); `.cuda()` stays where it is
    (models/common/language_module/language_module.py:244)."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **(kwargs or {}))


class _DeviceAndHost(_CudaTensorMethods):
    """A device and a host for Megatron's HybridDeviceOptimizer (optimizer/cpu_offloading/hybrid_optimizer.py:250-296),
    which copies to the host only what is on CUDA: every tensor answers that it is, except the copies made with
    `.cpu()` and what is derived from them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cuda.__get__:
            return not on_host(args[0])
        if func is torch.Tensor.cpu:
            return _mark_on_host(args[0].clone())
        if func is torch.Tensor.pin_memory:
            return args[0]
        result = super().__torch_function__(func, types, args, kwargs)
        if func in (torch.Tensor.float, torch.Tensor.detach, torch.Tensor.clone) and on_host(args[0]):
            _mark_on_host(result)
        return result


def on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in host memory while the weights are on the device (without CUDA: whether it stands for one)."""
    return getattr(tensor, "is_host_copy", False) or torch.cuda.is_available() and not tensor.is_cuda


def _mark_on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor.is_host_copy = True
    return tensor


def tensor_scope(host_copies: bool = False):
    """Context for building a model and for building, stepping, saving and loading an optimizer. Training calls
    need no such scope and pay nothing for it.

    Args:
        host_copies: tensors that `.cpu()` returns count as those of another memory than all others.
    """
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    return _DeviceAndHost() if host_copies else _CudaTensorMethods()


def install() -> bool:
    """Make the loaded megatron.core modules run on the CPU; a no-op where CUDA exists. Idempotent.

    Call it after the modules in use are imported; later imports need another call.
    """
    if torch.cuda.is_available():
        return False
    stand_in = _TorchForCpu()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = stand_in
    _patch_rng()
    _patch_moe()
    return True


def _patch_rng() -> None:
    # tensor_parallel/random.py:55, 235: activation recompute saves and restores the CUDA generator.
    rng = importlib.import_module("megatron.core.tensor_parallel.random")
    rng._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _patch_moe() -> None:
    # transformer/moe/moe_utils.py:1192 names te_general_gemm, which exists only with Transformer Engine.
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # transformer/moe/moe_utils.py:1093 converts split sizes to numpy only if the tensor is on CUDA, so
    # all_to_all_single would receive tensors as split sizes.
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _split_sizes_to_host


def _split_sizes_to_host(tensor, as_numpy=False, record_stream=False):
    return tensor.cpu().numpy() if torch.is_tensor(tensor) and as_numpy else tensor
