"""A Hugging Face model folder: its configuration, its tensors by our parameters' names, its other files."""
from __future__ import annotations

import difflib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator

from torch import Tensor

from megatron_longstraw.config import ModelConfig
from megatron_longstraw.convert.errors import FolderError
from megatron_longstraw.convert.families import FAMILIES
from megatron_longstraw.convert.hf_config import CONFIG, HFConfig
from megatron_longstraw.convert.rope import SETTINGS as ROPE_SETTINGS
from megatron_longstraw.convert.rope import write_rope
from megatron_longstraw.convert.safetensors_files import TensorFiles, is_weight
from megatron_longstraw.convert.tensors import Piece, Rule, Shard, dimensions

EMBEDDING = "embedding.word_embeddings.weight"
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Buffers that old checkpoints carry and nobody reads."""
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}


class HFFolder:
    """A model folder, checked whole: every tensor is there once, in the right file, with the right shape.

    Args:
        backfill: tensors that the family has no place for are left out (`extra`) instead of an error.

    Raises:
        FolderError: all that is wrong with it, tensor and file named.
    """

    def __init__(self, path: str | Path, backfill: bool = False):
        self.path = Path(path)
        hf = self._read_config()
        model_type = hf.values.get("model_type")
        family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if family is None:
            close = difflib.get_close_matches(str(model_type), FAMILIES, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise FolderError(self.path, [f"{CONFIG}: got model_type {model_type!r}, need {', '.join(FAMILIES)}{hint}"])
        self.config = hf.values
        self.settings: dict[str, Any] = family.settings(hf)
        """Fields of ModelConfig."""
        self.window_tokens: int | None = family.sliding_window(hf)
        self.warnings = hf.warnings
        if hf.problems:
            raise FolderError(self.path, hf.problems)
        self.files = TensorFiles(self.path)
        self.model = ModelConfig(**self.settings).resolve()
        self._rules = self._expand(family.tensors(self.model))
        self.extra: list[str] = []
        """Tensors no parameter comes from; an export copies them from here."""
        self._check_tensors(backfill)

    # -- tensors ---------------------------------------------------------------------------------------------

    def pieces(self, shard: Shard) -> Iterator[Piece]:
        """The blocks that a parameter's local part consists of (`shard.name`: its name in the whole model)."""
        rule, names = self._rules[shard.name]
        yield from rule.pieces(names, shard, self.model)

    def exported_pieces(self, shard: Shard) -> Iterator[Piece]:
        """The same, and the second copy of a tied embedding where the folder has one."""
        yield from self.pieces(shard)
        if shard.name == EMBEDDING and self._tied_copy:
            for piece in self.pieces(shard):
                yield piece._replace(name=self._tied_copy)

    def read(self, piece: Piece) -> Tensor:
        return self.files.read(piece.name, piece.source)

    @property
    def parameter_names(self) -> set[str]:
        return set(self._rules)

    @property
    def dtypes(self) -> set[str]:
        """Of the tensors that parameters come from, as safetensors spells them."""
        return {self.files.entries[name].dtype for _, names in self._rules.values() for name in names}

    def _read_config(self) -> HFConfig:
        if not self.path.is_dir():
            raise FolderError(self.path, ["no such folder; need a Hugging Face model folder (downloads are left to you)"])
        try:
            return HFConfig.read(self.path / CONFIG)
        except ValueError as error:
            raise FolderError(self.path, [str(error)]) from None

    def _expand(self, rules: tuple[Rule, ...]) -> dict[str, tuple[Rule, tuple[str, ...]]]:
        """Rules by the full name of our parameter, with the names that its tensors have in this folder."""
        ends = [name for name in self.files.entries if name.endswith("embed_tokens.weight")]
        prefix = ends[0].removesuffix("embed_tokens.weight") if len(ends) == 1 else "model."
        head_prefix = prefix.removesuffix("model.")
        expanded = {}
        for rule in rules:
            theirs = tuple(
                prefix + name.removeprefix("model.") if name.startswith("model.") else head_prefix + name
                for name in rule.theirs
            )
            layers = range(self.model.num_layers) if "{layer}" in rule.ours else (0,)
            experts = range(self.model.num_experts) if "{expert}" in rule.ours else (0,)
            for layer in layers:
                for expert in experts:
                    expanded[rule.ours.format(layer=layer, expert=expert)] = (rule, rule.numbered(theirs, layer, expert))
        self._tied_copy = None if self.model.untie_embeddings_and_output_weights else head_prefix + "lm_head.weight"
        if self._tied_copy not in self.files.entries:
            self._tied_copy = None
        return expanded

    def _check_tensors(self, backfill: bool) -> None:
        entries, problems, expected = self.files.entries, [], {}
        dims = dimensions(self.model)
        for rule, names in self._rules.values():
            expected.update(zip(names, rule.shapes(dims)))
        if self._tied_copy:
            expected[self._tied_copy] = expected[self._rules[EMBEDDING][1][0]]
        for name, shape in expected.items():
            entry = entries.get(name)
            if entry is None:
                problems.append(f"{name} is missing; the files are {', '.join(self.files.files[:3])}")
            elif entry.shape != shape:
                problems.append(f"{name} in {entry.file} has shape {list(entry.shape)}, need {list(shape)} by {CONFIG}")
            elif not is_weight(entry):
                problems.append(f"{name} in {entry.file} is {entry.dtype}, need float32, bfloat16 or float16")
        for name in entries:
            if name not in expected:
                self.extra.append(name)
                if not backfill and not _DERIVED.fullmatch(name):
                    problems.append(
                        f"{name} in {entries[name].file} has no place in a {self.config['model_type']} model "
                        f"(--backfill leaves such tensors out and copies them on export)"
                    )
        if not problems and self._tied_copy:
            problems += self._tied_problems()
        if problems:
            raise FolderError(self.path, problems)

    def _tied_problems(self) -> list[str]:
        embedding = self._rules[EMBEDDING][1][0]
        pairs = zip(self.files.read_bytes(embedding), self.files.read_bytes(self._tied_copy), strict=False)
        if self.files.entries[embedding].dtype == self.files.entries[self._tied_copy].dtype and all(a == b for a, b in pairs):
            return []
        return [
            f"{self._tied_copy} differs from {embedding}, but {CONFIG} ties them; set tie_word_embeddings to false there"
        ]

    # -- the rest --------------------------------------------------------------------------------------------

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response, from generation_config.json, else config.json; empty if neither says."""
        values: Any = None
        path = self.path / "generation_config.json"
        if path.exists():
            try:
                values = HFConfig.read(path).values.get("eos_token_id")
            except ValueError as error:
                raise FolderError(self.path, [str(error)]) from None
        if values is None:
            values = self.config.get("eos_token_id")
        ids = values if isinstance(values, list) else [] if values is None else [values]
        if any(type(token) is not int or token < 0 for token in ids):
            raise FolderError(self.path, [f"got eos_token_id {values!r}, need a token id or a list of them"])
        return tuple(ids)

    def copy_side_files(self, target: Path, model: ModelConfig) -> list[str]:
        """Everything but weights, byte for byte; config.json with the model's rotary settings where they differ.

        Returns: lines about what was changed.
        """
        for path in sorted(self.path.iterdir()):
            if path.suffix not in _WEIGHT_SUFFIXES and not path.name.startswith("."):
                copy = shutil.copytree if path.is_dir() else shutil.copyfile
                copy(path, target / path.name)
        settings = {name: getattr(model, name) for name in ROPE_SETTINGS}
        given = {name: getattr(self.model, name) for name in ROPE_SETTINGS}
        settings["max_position_embeddings"] = max(settings["max_position_embeddings"], given["max_position_embeddings"])
        consistent = not any("rope" in warning for warning in self.warnings)
        if settings == given and consistent:
            return []
        text = json.dumps(write_rope(self.config, replace(self.model, **settings)), indent=2, ensure_ascii=False)
        (target / CONFIG).write_text(text + "\n", encoding="utf-8")
        return [f"{CONFIG}: rotary settings are the run's: {json.dumps(write_rope({}, replace(self.model, **settings)))}"]
