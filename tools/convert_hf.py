"""Hugging Face folders to Megatron checkpoints, back, and a proof that nothing changed on the way.

    python tools/convert_hf.py import --hf DIR --save DIR
    python tools/convert_hf.py export --load DIR --hf-origin DIR --save DIR
    python tools/convert_hf.py verify --hf DIR [--load DIR] [--json]

Under torchrun it takes the layout flags of training (--tensor-model-parallel-size ...); a checkpoint written under one
layout loads under any other. Training reads a Hugging Face folder directly, too (--hf-checkpoint).
"""
from __future__ import annotations

import argparse
import dataclasses
import filecmp
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_longstraw.config import Config, ConfigError, parse_args, to_toml
from megatron_longstraw.convert.adopt import open_folder, with_model_of
from megatron_longstraw.convert.folder import HFFolder
from megatron_longstraw.disk import problem_with, writing
from megatron_longstraw.mcore import cpu_runtime, parallel
from megatron_longstraw.mcore.calls import response_logits
from megatron_longstraw.mcore.checkpoint import check_no_checkpoint, load_weights, require_newest, save_weights, saved_dtypes
from megatron_longstraw.mcore.hf_weights import check_target, load_hf, save_hf
from megatron_longstraw.mcore.model import build_model_chunks
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.train import exit_status
from megatron_longstraw.types import Branch, PromptGroup

LARGEST_LOGIT_DIFF = 1e-4
"""In float32, between this project's log-prob path and transformers."""


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def build(config: Config, bf16: bool) -> tuple[Config, list]:
    """A model without weights, in bfloat16 if `bf16`, unless --bf16 or --no-bf16 says otherwise."""
    if "bf16" not in config.given:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, bf16=bf16))
    config = config.resolve()
    cpu_runtime.install()
    return config, build_model_chunks(config)


def import_hf(config: Config, folder: HFFolder, target: Path) -> None:
    check_no_checkpoint(target)
    parallel.initialize(config.resolve())
    config, chunks = build(config, bf16=folder.dtypes == {"BF16"})
    begin = time.perf_counter()
    load_hf(chunks, config.model, folder)
    path = save_weights(chunks, target, model_toml(config))
    say(f"wrote {path} in {time.perf_counter() - begin:.1f} s ({'bfloat16' if config.model.bf16 else 'float32'})")
    say(f"train with --load {target} --hf-checkpoint {folder.path}, or with --load {target} --config {target}/model.toml")


def model_toml(config: Config) -> str:
    """The [model] section, which is all that a checkpoint of weights depends on."""
    text = to_toml(config)
    return text[text.index("[model]") : text.index("[parallel]")]


def export_hf(config: Config, folder: HFFolder, target: Path) -> None:
    check_target(target)
    parallel.initialize(config.resolve())
    checkpoint, notes = require_newest(config.checkpoint.load)
    config, chunks = build(config, bf16=torch.bfloat16 in saved_dtypes(checkpoint.path))
    begin = time.perf_counter()
    load(config, chunks, folder, checkpoint.path)
    for note in notes:
        say(note)
    with writing(target, "--save"):
        notes = save_hf(chunks, config.model, folder, target)
    for note in notes:
        say(note)
    say(f"wrote {target} in {time.perf_counter() - begin:.1f} s")


def load(config: Config, chunks: list, folder: HFFolder, path: Path) -> None:
    """The checkpoint's weights; with --backfill, those it lacks come from the folder."""
    backfill = config.checkpoint.backfill
    if backfill:
        load_hf(chunks, config.model, folder)
    for name in load_weights(chunks, config.model, path, missing_ok=backfill):
        say(f"{name}: not in the checkpoint, taken from {folder.path}")


def verify(config: Config, folder: HFFolder, num_tokens: int, as_json: bool) -> bool:
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, bf16=False)).resolve()
    policy = Policy(config, parallel.initialize(config), folder)
    ids = np.random.default_rng(0).integers(0, config.model.vocab_size, num_tokens + 1)
    half = num_tokens // 2
    ours = response_logits(policy, PromptGroup(ids[: half + 1], [Branch(ids[half + 1 :])]))[0]
    with tempfile.TemporaryDirectory() as scratch:
        places: list[str | None] = [scratch]
        dist.broadcast_object_list(places, src=0)
        copy = Path(places[0]) / "copy"
        save_hf(policy.chunks, config.model, folder, copy)
        different = differing_files(folder.path, copy) if dist.get_rank() == 0 else []
        dist.barrier()
    verdict = [True]
    if dist.get_rank() == 0:
        theirs = transformers_logits(folder.path, ids[:-1])[half:]
        result = {
            "hf": str(folder.path),
            "model_type": folder.config["model_type"],
            "tokens": num_tokens,
            "max_logit_diff": float(np.abs(ours - theirs).max()),
            "roundtrip_bit_equal": not different,
            "differing_files": different,
        }
        print(json.dumps(result) if as_json else "\n".join(f"{name:<20} {value}" for name, value in result.items()))
        verdict = [result["max_logit_diff"] <= LARGEST_LOGIT_DIFF and not different]
    dist.broadcast_object_list(verdict, src=0)
    return verdict[0]


def differing_files(origin: Path, copy: Path) -> list[str]:
    """Files of the copy that are not byte for byte those of the origin."""
    names = sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file())
    return [name for name in names if not filecmp.cmp(origin / name, copy / name, shallow=False)]


def transformers_logits(path: Path, ids: np.ndarray) -> np.ndarray:
    """float32 logits [tokens, vocab] of the Hugging Face model."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None]).logits[0].numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("import", "export", "verify"))
    parser.add_argument("--hf", "--hf-origin", metavar="DIR", help="Hugging Face model folder")
    parser.add_argument("--tokens", type=int, default=64, help="verify: length of the compared sequence (default: 64)")
    parser.add_argument("--json", action="store_true", help="verify: print one JSON line")
    config, args = parse_args(extra=parser)
    needs = {"import": ("hf", "save"), "export": ("hf", "save", "load"), "verify": ("hf",)}[args.command]
    given = {"hf": args.hf, "save": config.checkpoint.save, "load": config.checkpoint.load}
    problems = [f"{args.command} needs --{name}" for name in needs if given[name] is None]
    if "save" in needs and given["save"] is not None:
        problems.append(problem_with(given["save"], "--save"))
    if any(problems):
        raise ConfigError(list(filter(None, problems)))
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, hf_checkpoint=args.hf))
    folder = open_folder(config)
    for warning in folder.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    # No prompts here, so no limits on them.
    rollout = dataclasses.replace(config.rollout, max_prompt_length=None, max_response_length=1)
    config = with_model_of(dataclasses.replace(config, rollout=rollout), folder)
    if args.command == "import":
        import_hf(config, folder, Path(config.checkpoint.save))
    elif args.command == "export":
        export_hf(config, folder, Path(config.checkpoint.save))
    elif not verify(config, folder, args.tokens, args.json):
        raise ValueError("the folder and this project's model of it differ")


if __name__ == "__main__":
    sys.exit(exit_status(main))
