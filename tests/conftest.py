"""Markers and what the default run leaves out: `slow` (add --slow) and `gpu` (needs a CUDA device)."""
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded; child processes inherit it

import torch

MARKERS = {
    "slow": "takes more than a few seconds; left out without --slow",
    "dist": "starts several processes (gloo on the CPU)",
    "gpu": "needs a CUDA device; left out where there is none",
}


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption("--kills", type=int, default=4, help="how often test_kills.py kills a run")
    parser.addoption("--kill-seed", type=int, default=3, help="decides when and whom")


def pytest_configure(config):
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    torch.set_num_threads(1)  # several workers share the cores, and results must not depend on the split of a sum


def pytest_collection_modifyitems(config, items):
    """Deselect (not skip) what this run leaves out, so that a skip always means something unexpected."""
    left_out = set()
    if not config.getoption("--slow"):
        left_out.add("slow")
    if not torch.cuda.is_available():
        left_out.add("gpu")
    kept, dropped = [], []
    for item in items:
        (dropped if any(mark.name in left_out for mark in item.iter_markers()) else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
