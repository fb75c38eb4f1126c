"""What check_gradients.py compares: a tiny model, random prompts and responses, random token weights, and the
oracle's answer to them."""
from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megatron_longstraw.config import Config, config_from_args, load_config, parse_args, to_toml
from megatron_longstraw.convert.adopt import open_folder, with_model_of
from megatron_longstraw.types import Branch, PromptGroup

TINY = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 128,
    "vocab_size": 250,  # not a multiple of the padding, so that padded rows exist
    "init_method_std": 0.08,
    "prefix_chunk_tokens": 64,
    "prefix_block_tokens": 100,
    "branches_per_microbatch": 2,
    "group_size": 3,
    "max_response_length": 6,
}
MOE = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
ONE_RANK = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "num_virtual_stages_per_pipeline_rank": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
    "use_distributed_optimizer": False,
    "overlap_grad_reduce": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
}

TokenWeights = dict[tuple[int | str, int], np.ndarray]
"""float32 dL/dlogp by (group id, branch)."""


@dataclass
class GradientCase:
    """One comparison; every rank builds the same."""

    config: Config
    groups: list[PromptGroup]
    """All prompts, by group id; rank r of dp takes every dp-th from r on."""
    weights: TokenWeights

    def of_rank(self, dp_rank: int, dp_size: int) -> list[PromptGroup]:
        return self.groups[dp_rank::dp_size]


def tool_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=("dense", "moe"), default="dense")
    parser.add_argument("--prompt-tokens", default="256", help="prompt length, or several that prompts take in turn")
    parser.add_argument("--response-lengths", default="17,9,30", help="tokens of each response of a prompt")
    parser.add_argument("--prompts-per-rank", type=int, default=1, help="prompts of each data-parallel rank")
    parser.add_argument("--tolerance", type=float, default=5e-6, help="largest worst_param_rel_err that passes")
    parser.add_argument("--oracle-cache", type=Path, help="folder in which oracle results are kept and found again")
    parser.add_argument("--cases", type=Path, help="JSON list of flag lists: run them all, print a list of objects")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parser


def parse(
    argv: list[str] | None, description: str = "", parser: argparse.ArgumentParser | None = None
) -> tuple[Config, argparse.Namespace]:
    """The tiny model < `--arch moe` < TOML files < flags, or the model of --hf-checkpoint. `parser`: `tool_parser` and
    more."""
    given, args = parse_args(argv, extra=parser or tool_parser(description))
    if given.checkpoint.hf_checkpoint is not None:
        return with_model_of(given, open_folder(given)).resolve(), args
    return config_from_args(args, TINY | (MOE if args.arch == "moe" else {})).resolve(), args


def make_case(config: Config, args: argparse.Namespace, dp_size: int) -> GradientCase:
    """The same prompts, responses and weights for every layout with as many prompts."""
    rng = np.random.default_rng(config.run.seed)
    prompt_lengths = [int(x) for x in args.prompt_tokens.split(",")]
    response_lengths = [int(x) for x in args.response_lengths.split(",")]
    groups, weights = [], {}
    for number in range(dp_size * args.prompts_per_rank):
        prompt = rng.integers(0, config.model.vocab_size, prompt_lengths[number % len(prompt_lengths)])
        branches = [Branch(rng.integers(0, config.model.vocab_size, length)) for length in response_lengths]
        groups.append(PromptGroup(prompt, branches, group_id=number))
        for index, length in enumerate(response_lengths):
            # Every token its own weight, so that no two can be confused.
            weights[number, index] = rng.standard_normal(length).astype(np.float32)
    return GradientCase(config, groups, weights)


def detached_tokens(config: Config, group: PromptGroup) -> int:
    """How many leading tokens the oracle cuts from the graph for this `prefix_grad`."""
    prefix = config.prefix
    num_chunks = -(-group.num_prefix_tokens // prefix.prefix_chunk_tokens)
    cut_chunks = num_chunks - prefix.num_chunks_walked_back(num_chunks)
    return min(cut_chunks * prefix.prefix_chunk_tokens, group.num_prefix_tokens)


def oracle_input(case: GradientCase, bf16: bool) -> dict:
    config = case.config
    sections = (config.model, config.rollout, config.run)
    overrides = {name: value for section in sections for name, value in vars(section).items()} | ONE_RANK
    overrides["bf16"] = bf16
    samples = [
        {
            "prompt": torch.from_numpy(group.prompt_ids),
            "response": torch.from_numpy(branch.response_ids),
            "weights": torch.from_numpy(case.weights[group.group_id, index]),
            "detach": detached_tokens(config, group),
        }
        for group in case.groups
        for index, branch in enumerate(group.branches)
        if branch.num_tokens
    ]
    return {"config": to_toml(load_config([], overrides)), "perturb_seed": config.run.seed, "samples": samples}


def ask_oracle(cases: list[GradientCase], cache: Path | None, bf16: bool = False) -> list[dict]:
    """The oracle's answers (in float32 unless asked otherwise), from one clean process for all that the cache does
    not hold."""
    with tempfile.TemporaryDirectory() as folder:
        cache = cache or Path(folder)
        cache.mkdir(parents=True, exist_ok=True)
        outputs, jobs = [], []
        for case in cases:
            question = oracle_input(case, bf16)
            name = hashlib.blake2b(_bytes_of(question), digest_size=12).hexdigest()
            outputs.append(cache / f"{name}.pt")
            if not outputs[-1].exists() and outputs[-1] not in [output for _, output in jobs]:
                question_file = Path(folder) / f"{name}.question"
                torch.save(question, question_file)
                jobs.append((question_file, outputs[-1]))
        if jobs:
            _run_oracle(jobs)
        return [torch.load(output) for output in outputs]


def _bytes_of(question: dict) -> bytes:
    parts = [question["config"], str(question["perturb_seed"])]
    for sample in question["samples"]:
        parts += [str(sample["detach"]), *(str(sample[name].tolist()) for name in ("prompt", "response", "weights"))]
    return "|".join(parts).encode()


def _run_oracle(jobs: list[tuple[Path, Path]]) -> None:
    distributed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC")
    env = {key: value for key, value in os.environ.items() if not key.startswith(distributed)}
    script = Path(__file__).with_name("full_sequence_oracle.py")
    env["PYTHONPATH"] = os.pathsep.join([str(script.parents[1]), *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, str(script), *(str(path) for job in jobs for path in job)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the oracle failed:\n{done.stderr[-4000:]}")
