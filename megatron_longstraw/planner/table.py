"""Longest contexts of known models on one node, as a Markdown table."""
from __future__ import annotations

from megatron_longstraw.planner.hardware import Hardware


def table(hardware: Hardware) -> str:
    return ""
