"""One GRPO gradient step of this project beside those of other libraries: the same weights, prompt and responses.

    pip install -e '.[peers]'
    python tools/bench_peers.py --prompt-tokens 8192 --group-size 8 --response-tokens 64

    hf                        Hugging Face transformers, one whole sequence per response: the reference
    trl                       TRL's GRPOTrainer with its defaults: all responses in one batch, activation recompute
    trl_lean                  the same with as little memory as it can do: one response at a time, and (as TRL does by
                              itself on CUDA, but not on a CPU) only response positions through the LM head
    prefix_grouper            prefix-grouper on transformers: prompt and responses as one row
    prefix_grouper_recompute  the same with activation recompute
    exact, frozen             this project

A random Qwen2 model is saved in Hugging Face format and read by everyone (float32, CPU). Every contender runs in a
process of its own with the same number of threads. Peak bytes and gradients come from one untimed step, seconds are
minima over --repeats steps in which the contenders take turns ("cpu s": processor seconds of all threads, which a busy
machine disturbs less). Peak bytes are what the step allocates above weights and gradients, counted by allocation
(allocation_tracker.py). The error is the worst parameter's ||dg|| / ||g|| against `hf`, which rounds too: contenders
that share its kernels share some of its rounding. The JSON has every parameter's. What is timed is forward and
backward of one whole group: no generation, no optimizer.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from peers import Case, HuggingFace, Longstraw, PrefixGrouper, Trl
from workers import bench_parser, measure_in_turns, parameter_errors

from megatron_longstraw.config import Config, ConfigError, check, load_config
from megatron_longstraw.objectives.advantages import group_advantages

REFERENCE = "hf"
CONTENDERS = {
    "hf": (HuggingFace,),
    "trl": (Trl,),
    "trl_lean": (Trl, True),
    "prefix_grouper": (PrefixGrouper,),
    "prefix_grouper_recompute": (PrefixGrouper, True),
    "exact": (Longstraw, "exact"),
    "frozen": (Longstraw, "frozen"),
}
"""Name -> class and what it is built with after the case."""
FIELDS = {
    "group_size": 8,
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 1024,
    "vocab_size": 4096,
    "prefix_chunk_tokens": 1024,
    "prefix_block_tokens": 2048,
    "seed": 1234,
}
"""Fields of this project's configuration that are flags here, with their defaults."""

CHILD_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore",
}
"""Every contender on the CPU, and nothing looked up or announced by the libraries."""


def tool_parser() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__, 2048, "contender", CONTENDERS)
    for name, value in FIELDS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=value, metavar="N", help=f"default {value}")
    return parser


def parse(argv: list[str] | None = None) -> tuple[Config, argparse.Namespace]:
    """The model's shape as this project's configuration, and the tool's own options.

    Raises:
        ConfigError: the shape or the group is impossible, or a contender's library is not installed.
    """
    args = tool_parser().parse_args(argv)
    config = load_config(overrides={name: getattr(args, name) for name in FIELDS} | {"add_qkv_bias": True}).resolve()
    check(config, world_size=1)
    if args.group_size < 2:
        got = f"got group_size {args.group_size}, need at least 2"
        raise ConfigError([f"{got}: a response alone has no advantage; change --group-size"])
    needed = {name: library for name in args.contenders if (library := CONTENDERS[name][0].library)}
    missing = [name for name, library in needed.items() if importlib.util.find_spec(library) is None]
    if missing:
        left = ",".join(name for name in args.contenders if name not in missing)
        libraries = " and ".join(sorted({needed[name] for name in missing}))
        raise ConfigError(
            [f"{libraries} not installed: run pip install -e '.[peers]', or leave them out with --contenders {left}"]
        )
    return config, args


# -- what the contenders share -------------------------------------------------------------------------------


def save_random_model(config: Config, folder: str) -> None:
    """A Qwen2 model of this shape; norms and biases are random too, so that no contender may drop one unnoticed."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(config.run.seed)
    shape = config.model
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.ffn_hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_query_groups,
            max_position_embeddings=shape.max_position_embeddings,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def make_case(config: Config, args: argparse.Namespace, folder: str) -> Case:
    """Random tokens and rewards on the model in `folder`."""
    rng = np.random.default_rng(config.run.seed)
    vocab_size, group_size = config.model.vocab_size, config.rollout.group_size
    prompt = rng.integers(0, vocab_size, args.prompt_tokens)
    responses = rng.integers(0, vocab_size, (group_size, args.response_tokens))
    rewards = rng.normal(size=group_size)
    advantages = group_advantages(rewards, [True] * group_size).astype(np.float32)
    options = {name: getattr(args, name) for name in ("group_size", "prefix_chunk_tokens", "prefix_block_tokens")}
    options["max_response_length"] = args.response_tokens
    return Case(folder, prompt, responses, rewards, advantages, options, torch.get_num_threads())


# -- the whole run -------------------------------------------------------------------------------------------


def run(config: Config, args: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(config, folder)
        case = make_case(config, args, folder)
        contenders = {name: (CONTENDERS[name][0], case, *CONTENDERS[name][1:]) for name in args.contenders}
        measured, grads, timed = measure_in_turns(contenders, args.repeats)
    results = {}
    for name, times in timed.items():
        errors = parameter_errors(grads[name], grads[REFERENCE]) if REFERENCE in grads else None
        results[name] = {
            "total_s": min(t["total_s"] for t in times),
            "cpu_s": min(t["cpu_s"] for t in times),
            **measured[name],
            "worst_param_rel_err": errors and float(np.max(list(errors.values()))),
            "worst_param": errors and max(errors, key=errors.get),
            "param_rel_err": errors,
        }
    return {"contenders": results, "config": describe(args)}


def describe(args: argparse.Namespace) -> dict:
    names = ("torch", "transformers", "megatron-core", "trl", "prefix-grouper")
    installed = {dist.name.lower().replace("_", "-"): dist.version for dist in metadata.distributions()}
    return {
        "prompt_tokens": args.prompt_tokens,
        "response_tokens": args.response_tokens,
        **{name: getattr(args, name) for name in FIELDS},
        "repeats": args.repeats,
        "threads": torch.get_num_threads(),
        "versions": {name: installed.get(name) for name in names},
    }


def table(result: dict) -> str:
    lines = [f"{'contender':25} {'seconds':>9} {'cpu s':>9} {'peak MiB':>9} {'error':>9}  worst parameter"]
    for name, cost in result["contenders"].items():
        error = "-" if cost["worst_param"] is None else f"{cost['worst_param_rel_err']:.1e}"
        peak = cost["peak_bytes"] / 2**20
        lines.append(f"{name:25} {cost['total_s']:9.2f} {cost['cpu_s']:9.2f} {peak:9.1f} {error:>9}  {cost['worst_param'] or ''}")
    return "\n".join(lines)


def main() -> int:
    os.environ |= CHILD_ENVIRONMENT
    try:
        config, args = parse()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    result = run(config, args)
    if args.json is None:
        print(table(result))
    elif args.json == "-":
        print(json.dumps(result))
    else:
        Path(args.json).write_text(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
