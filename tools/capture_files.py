"""A frozen capture in files, so that a long one can stop and go on.

    FOLDER/capture.json                 what it is a capture of, chunks done, seconds spent
    FOLDER/chunks_00000_00015.rank3.safetensors
"""
from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_longstraw.config import ConfigError, to_toml
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.prefix.store import PrefixStore


class CaptureFiles:
    """Writes and reads the K, V of a store's chunks; all ranks call every method together."""

    def __init__(self, folder: Path, policy: Policy, store: PrefixStore):
        self.folder, self.policy, self.store = folder, policy, store
        self.what = {"config": to_toml(policy.config), "ranks": dist.get_world_size(), "weights": policy.checksum()}
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, chunks: range, seconds: float) -> None:
        """Add these chunks, of which the last is the last that is done; `seconds` spent on all chunks so far."""
        begin, end = (self.store.plan.local_offset(index) for index in (chunks.start, chunks.stop))
        tensors = {}
        for layer, state in self.store.layers.items():
            for block in state.blocks(end):
                first = max(begin - block.begin, 0)
                if first < block.end - block.begin:
                    tensors[f"{layer}.{block.begin + first}.k"] = block.k[:, :, first:].contiguous()
                    tensors[f"{layer}.{block.begin + first}.v"] = block.v[:, :, first:].contiguous()
        save_file(tensors, self._file(chunks))
        dist.barrier()
        if dist.get_rank() == 0:
            spans = [*self._manifest().get("spans", []), [chunks.start, chunks.stop]]
            unfinished = self.folder / "capture.json.unfinished"
            unfinished.write_text(json.dumps(self.what | {"spans": spans, "seconds": seconds}))
            unfinished.rename(self.folder / "capture.json")
        dist.barrier()

    def load(self) -> tuple[int, float]:
        """Fill the store with what is there: (chunks done, seconds spent on them).

        Raises:
            ConfigError: the folder holds another capture.
        """
        manifest = self._manifest()
        changed = [name for name in self.what if manifest.get(name, self.what[name]) != self.what[name]]
        if changed:
            raise ConfigError([f"--state {self.folder} holds a capture of another {changed[0]}: name another folder"])
        for span in manifest.get("spans", []):
            tensors = load_file(self._file(range(*span)))
            for name, k in tensors.items():
                layer, begin, kind = name.split(".")
                if kind == "k":
                    rows = (k, tensors[f"{layer}.{begin}.v"])
                    self.store.layer(int(layer)).append(int(begin), *(x.permute(2, 0, 1, 3) for x in rows))
        spans = manifest.get("spans", [])
        return (spans[-1][1] if spans else 0), manifest.get("seconds", 0.0)

    def _manifest(self) -> dict:
        path = self.folder / "capture.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _file(self, chunks: range) -> Path:
        return self.folder / f"chunks_{chunks.start:05}_{chunks.stop - 1:05}.rank{dist.get_rank()}.safetensors"
