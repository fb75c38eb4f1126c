"""What --fp8-prefix does to log-probs and gradients of one step, and how much of a prompt's work it can save.

    python tools/fp8_error.py --json                                      # the tiny model of check_gradients.py
    python tools/fp8_error.py --hf-checkpoint DIR --bf16 --text book.txt --prompt-tokens 1024 --response-lengths 64
    python tools/fp8_error.py --config launch/models/qwen3-8b.toml --shares-only

Takes every training flag and runs under torchrun too; with --fp8-prefix off both recipes are measured. Against the
same step without FP8:

    mean_logprob_diff, max_logprob_diff   of the response tokens
    grad_rel_err, grad_cosine             of the whole gradient: ||dg|| / ||g||, and its angle

`linear_share` is the part of a prompt's operations (capture, and the walk back without activation recompute) that is
in linear layers, by prompt length. FP8 can halve its time at best, so half of it is the most that can be saved.
"""
from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from check_gradients import cosine, products, step_gradients
from full_sequence_oracle import perturb
import gradient_case
from gradient_case import GradientCase, make_case, tool_parser

from megatron_longstraw.config import Config, ConfigError, ModelConfig
from megatron_longstraw.convert.adopt import open_folder
from megatron_longstraw.data.tokenizers import load_tokenizer
from megatron_longstraw.gradients import in_step
from megatron_longstraw.mcore import fp8, parallel
from megatron_longstraw.mcore.packing import batch_prompts
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.types import Branch, PromptGroup
from megatron_longstraw.user_errors import report as report_error

RECIPES = ("tensorwise", "blockwise")
SHARE_TOKENS = (50_000, 131_072, 1_048_576, 2_100_000)


def linear_share(model: ModelConfig, prompt_tokens: int) -> float:
    """Of the operations on a prompt of this length in a resolved model. A token's linear layers run forward twice and
    backward (two forwards' worth); its attention to half the prompt runs forward once and backward (2.5)."""
    heads, groups, channels = model.num_attention_heads, model.num_query_groups, model.kv_channels
    weights = model.hidden_size * channels * 2 * (heads + groups)
    mlp_width = model.ffn_hidden_size
    if model.num_experts is not None:
        mlp_width = model.moe_router_topk * model.moe_ffn_hidden_size
        mlp_width += model.moe_shared_expert_intermediate_size or 0
    weights += 3 * model.hidden_size * mlp_width
    linear = 4 * 2 * weights
    attention = 3.5 * 4 * heads * channels * prompt_tokens / 2
    return linear / (linear + attention)


def text_case(case: GradientCase, path: Path, tokenizer: str) -> GradientCase:
    """The same lengths and weights, with a text as prompt and its continuation as responses."""
    ids = load_tokenizer(tokenizer).encode(path.read_text())
    groups = []
    for group in case.groups:
        begin = group.num_prompt_tokens
        need = begin + max(branch.num_tokens for branch in group.branches)
        if need > len(ids):
            raise ConfigError([f"got {path} of {len(ids)} tokens, need {need}; change --text or --prompt-tokens"])
        branches = [Branch(ids[begin : begin + branch.num_tokens]) for branch in group.branches]
        groups.append(PromptGroup(ids[:begin], branches, group_id=group.group_id))
    return replace(case, groups=groups)


def measure(config: Config, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By recipe."""
    asked = config.prefix
    recipes = RECIPES if asked.fp8_prefix == "off" else (asked.fp8_prefix,)
    config = replace(config, prefix=replace(asked, fp8_prefix="off", fp8_backend="auto"))
    folder = open_folder(config)
    layout = parallel.initialize(config)
    case = make_case(config, args, layout.dp_size)
    if args.text is not None:
        case = text_case(case, args.text, config.data.tokenizer_model or config.checkpoint.hf_checkpoint)
    policy = Policy(config, layout, folder)
    if folder is None:
        perturb(policy.chunks, config.model, config.run.seed)
        policy.weights_changed()
    own = case.of_rank(layout.dp_rank, layout.dp_size)
    batches = in_step(policy, batch_prompts(own, config.prefix.prompts_per_microbatch))
    exact, truth, _ = step_gradients(policy, batches, case.weights)
    results = {}
    for recipe in recipes:
        policy.fp8 = fp8.choose(replace(config, prefix=replace(asked, fp8_prefix=recipe)), layout.device)
        grads, logprobs, _ = step_gradients(policy, batches, case.weights)
        dot, aa, bb = products(grads, exact)
        differences = np.abs(np.concatenate([logprobs[place] - truth[place] for place in truth]))
        results[recipe] = {
            "backend": policy.fp8.backend,
            "mean_logprob_diff": float(differences.mean()),
            "max_logprob_diff": float(differences.max()),
            "grad_rel_err": float(np.sqrt(max(aa + bb - 2 * dot, 0.0) / bb)),
            "grad_cosine": cosine(grads, exact),
        }
    return results


def parse(argv: list[str]) -> tuple[Config, argparse.Namespace]:
    parser = tool_parser(__doc__)
    parser.add_argument("--text", type=Path, help="text that prompt and responses are taken from; none: random ids")
    parser.add_argument("--shares-only", action="store_true", help="measure nothing")
    return gradient_case.parse(argv, parser=parser)


def main(argv: list[str]) -> int:
    try:
        config, args = parse(argv)
        torch.set_num_threads(1)
        shares = {str(tokens): linear_share(config.model, tokens) for tokens in SHARE_TOKENS}
        result = {"linear_share": shares} | ({} if args.shares_only else measure(config, args))
    except ValueError as error:
        report_error(error)
        return 2
    if not dist.is_initialized() or dist.get_rank() == 0:
        rows = [] if args.json else [f"{name:14} {values}" for name, values in result.items()]
        print(json.dumps(result) if args.json else "\n".join(rows))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
