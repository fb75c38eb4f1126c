"""What a run runs on: versions, devices, memory."""
from __future__ import annotations

import platform
import resource
import sys
from importlib import metadata

import torch
import torch.distributed as dist

import megatron_longstraw

PACKAGES = ("torch", "megatron-core", "transformer-engine", "numpy", "transformers")


def environment() -> dict[str, str | int]:
    """Versions of this project, Python and what computes (as far as installed); the device; the number of ranks."""
    versions = {"megatron_longstraw": megatron_longstraw.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    cuda = torch.cuda.is_available()
    return versions | {
        "cuda": torch.version.cuda if cuda else "none",
        "device": torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()})",
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
    }


def peak_memory_bytes() -> int:
    """Largest memory of this process so far: allocated on the GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
