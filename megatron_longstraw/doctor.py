"""What this machine can do, on one screen. Exit status 0 when training can run.

    python -m megatron_longstraw.doctor
"""
from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Iterator

REQUIRED = (
    "torch",
    "megatron-core",
    "numpy",
    "psutil",
    "safetensors",
    "transformers",
    "sentencepiece",
    "pyarrow",
    "orjson",
    "jinja2",
    "tensorboard",
    "tqdm",
)
"""What setup.cfg declares."""
RANGES = {"torch": ((2, 11), (2, 15)), "megatron-core": ((0, 16), (0, 17))}
"""Versions (major, minor) from, and below, that setup.cfg accepts of the two that nothing works without."""
INSTALL = "bash launch/quickstart.sh makes .venv with all; by hand: pip install -c constraints.txt -e '.[logging]'"
TRANSFORMER_ENGINES = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-cu12")
FP8_RECIPES = {
    "delayed": "is_fp8_available",
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
"""Megatron's name of a recipe -> what Transformer Engine is asked."""
ENOUGH_DISK_BYTES = 2**30
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the screen."""

    name: str
    text: str
    missing: str = ""
    """What its absence costs and how to get it."""
    stops_training: bool = False


def examine() -> list[Finding]:
    """Everything found, in the order of the screen."""
    torch = _import_torch()
    findings = [_python(), _torch(torch), *_packages()]
    if not isinstance(torch, str):
        findings += [*_gpus(torch), _communication(torch)]
    cuda = not isinstance(torch, str) and torch.cuda.is_available()
    return [*findings, _transformer_engine(cuda), _flash_attention(), _apex(), _slurm(), _memory(), _disk(Path.cwd())]


def _import_torch():
    """torch, or why it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a CUDA library that it links to is not there
        return str(error)
    return torch


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Finding("python", f"{version} {sys.executable}", "" if fits else f"need 3.11 or 3.12; {INSTALL}", not fits)


def _torch(torch) -> Finding:
    if isinstance(torch, str):
        return Finding("torch", f"cannot be imported: {torch}", f"nothing runs; {INSTALL}", True)
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return _in_range("torch", torch.__version__, f", built with {cuda}")


def _packages() -> Iterator[Finding]:
    version = _version("megatron-core")
    if version:
        yield _in_range("megatron-core", version)
    absent = [name for name in REQUIRED if name != "torch" and _version(name) is None]
    if absent:
        yield Finding("packages", f"not installed: {', '.join(absent)}", f"nothing runs; {INSTALL}", True)


def _in_range(name: str, version: str, more: str = "") -> Finding:
    low, below = RANGES[name]
    if low <= tuple(map(int, version.split(".")[:2])) < below:
        return Finding(name, version + more)
    low, below = (".".join(map(str, bound)) for bound in (low, below))
    return Finding(name, version + more, f"not supported: need {low} or later, below {below}; {INSTALL}", True)


def _gpus(torch) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        cost = "the CPU only: small models, for trying things out"
        if torch.version.cuda is None and _nvidia_driver():
            cost += "; this machine has an NVIDIA driver, but this torch is built without CUDA: install a CUDA build"
        yield Finding("gpus", "none", cost)
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        memory = f"{total_bytes / GIB:.1f} GiB, {free_bytes / GIB:.1f} GiB free"
        yield Finding(f"gpu {index}", f"{facts.name}, sm_{facts.major}{facts.minor}, {memory}")


def _nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def _communication(torch) -> Finding:
    dist = torch.distributed
    if not dist.is_available():
        return Finding("between ranks", "not in this build of torch", f"nothing runs; {INSTALL}", True)
    cuda = torch.cuda.is_available()
    present = []
    if cuda and dist.is_nccl_available():
        present.append("nccl " + ".".join(map(str, torch.cuda.nccl.version())))
    if dist.is_gloo_available():
        present.append("gloo")
    usable = bool(present) and (not cuda or "nccl" in present[0])
    need = "" if usable else f"ranks cannot meet: need {'nccl on GPUs' if cuda else 'gloo on the CPU'}; {INSTALL}"
    return Finding("between ranks", ", ".join(present) or "neither nccl nor gloo", need, not usable)


def _transformer_engine(cuda: bool) -> Finding:
    name, cost = "transformer engine", "FP8 without its kernels and no fused layers: Megatron's local layers are used"
    if importlib.util.find_spec("transformer_engine") is None:
        how = "pip install --no-build-isolation 'megatron_longstraw[te]' beside a CUDA build of torch"
        return Finding(name, "missing", f"{cost}; {how if cuda else 'it needs a CUDA device'}")
    version = next(filter(None, map(_version, TRANSFORMER_ENGINES)), "of unknown version")
    if not cuda:
        return Finding(name, f"{version}, not usable", f"{cost}; it needs a CUDA device")
    try:
        import transformer_engine.pytorch as te
    except (ImportError, OSError) as error:
        return Finding(name, f"{version}, cannot be imported: {error}", f"{cost}; build it against this torch")
    recipes = [recipe for recipe, question in FP8_RECIPES.items() if hasattr(te, question) and getattr(te, question)()]
    return Finding(name, f"{version}; FP8 recipes here: {', '.join(recipes) or 'none'}")


def _flash_attention() -> Finding:
    found = [f"{name} {_version(name)}" for name in ("flash-attn", "flash-attn-3") if _version(name)]
    if found:
        return Finding("flash-attn", ", ".join(found))
    return Finding("flash-attn", "missing", "nothing is lost: PyTorch's own flash attention kernels are used")


def _apex() -> Finding:
    """NVIDIA's has apex/multi_tensor_apply; the project of that name on PyPI is a toolkit for Pyramid web servers."""
    cost = "nothing is lost: Megatron-Core falls back to PyTorch; NVIDIA's is built from its source repository"
    spec = importlib.util.find_spec("apex")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    if not folders:
        return Finding("apex", "missing", cost)
    if not any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        what = f"the wrong one in {folders[0]}: PyPI's apex is an authentication toolkit for Pyramid, not NVIDIA's"
        return Finding("apex", what, "Megatron-Core may stumble over it: pip uninstall apex")
    if importlib.util.find_spec("amp_C") is None:
        return Finding("apex", "NVIDIA's, without its CUDA extensions", cost)
    return Finding("apex", "NVIDIA's, with its CUDA extensions")


def _slurm() -> Finding:
    job = os.environ.get("SLURM_JOB_ID")
    if job is not None:
        return Finding("slurm", f"inside job {job}, nodes {os.environ.get('SLURM_JOB_NODELIST', 'unknown')}")
    found = shutil.which("sbatch")
    if found:
        return Finding("slurm", found)
    return Finding("slurm", "missing", "nothing is lost on one machine; several are joined with torchrun --nnodes")


def _memory() -> Finding:
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Finding("host", f"{len(os.sched_getaffinity(0))} CPU cores, {total_bytes / GIB:.1f} GiB memory")


def _disk(folder: Path) -> Finding:
    free_bytes = shutil.disk_usage(folder).free
    text = f"{free_bytes / GIB:.1f} GiB free in {folder}"
    if not os.access(folder, os.W_OK):
        return Finding("disk", text + ", not writable", "runs cannot write here: start elsewhere, or --run-dir", True)
    if free_bytes < ENOUGH_DISK_BYTES:
        return Finding("disk", text, "runs may fail to write their logs and weights: free some, or --run-dir")
    return Finding("disk", text)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def screen(findings: list[Finding]) -> str:
    """The findings as text, and the verdict."""
    lines = []
    for finding in findings:
        mark = "  " if not finding.missing else "! " if finding.stops_training else "- "
        lines.append(f"{mark}{finding.name:<20}{finding.text}")
        if finding.missing:
            lines.append(f"{'':<22}{finding.missing}")
    stopped = [finding.name for finding in findings if finding.stops_training]
    lines.append(f"training cannot run: {', '.join(stopped)}" if stopped else "training can run")
    return "\n".join(lines)


def main() -> int:
    findings = examine()
    print(screen(findings))
    return int(any(finding.stops_training for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
