"""Compare one step's gradients, in any layout, with plain autograd of the stock model over full sequences.

    torchrun --nproc-per-node 2 tools/check_gradients.py --context-parallel-size 2 --json
    torchrun --nproc-per-node 4 tools/check_gradients.py --tensor-model-parallel-size 2 --sequence-parallel \\
        --pipeline-model-parallel-size 2 --recompute-granularity full --arch moe --json

Takes every training flag; the model is tiny unless flags say otherwise. The oracle (full_sequence_oracle.py) runs
in a process of its own without any parallelism. Prints one JSON object (rank 0) and exits 1 when the error is
over --tolerance.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from full_sequence_oracle import perturb

from megatron_longstraw.config import Config, ConfigError, load_config, parse_args, to_toml
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.calls import Table, capture, full_sequences, prefix_backward, replay, score
from megatron_longstraw.mcore.packing import PromptBatch, batch_prompts
from megatron_longstraw.mcore.parameters import named_shards
from megatron_longstraw.mcore.policy import Policy
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
}
MOE = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
ORACLE_LAYOUT = {
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
NEGLIGIBLE = 1e-6
"""A parameter whose reference gradient is under this share of the whole is judged against the whole."""


def tool_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=("dense", "moe"), default="dense")
    parser.add_argument("--prompt-tokens", default="256", help="prompt length, or several that prompts take in turn")
    parser.add_argument("--response-lengths", default="17,9,30", help="tokens of each response of a prompt")
    parser.add_argument("--prompts-per-rank", type=int, default=1, help="prompts of each data-parallel rank")
    parser.add_argument("--tolerance", type=float, default=5e-6)
    parser.add_argument("--oracle-cache", type=Path, help="folder in which oracle results are kept and found again")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    return parser


def parse(argv: list[str] | None = None) -> tuple[Config, argparse.Namespace]:
    """Tiny-model defaults < --arch moe < training flags."""
    _, args = parse_args(argv, extra=tool_parser())
    defaults = TINY | (MOE if args.arch == "moe" else {})
    given = {name.removeprefix("config."): value for name, value in vars(args).items() if name.startswith("config.")}
    from megatron_longstraw.config import SETTINGS

    typed = {n: v if SETTINGS[n].type is bool else SETTINGS[n].from_text(v) for n, v in given.items()}
    return load_config(args.config_files, defaults | typed).resolve(), args


def make_groups(config: Config, args: argparse.Namespace, num_ranks: int) -> list[list[PromptGroup]]:
    """Random prompts and responses per data-parallel rank; the same for every layout with as many prompts."""
    rng = np.random.default_rng(config.run.seed)
    prompt_lengths = [int(x) for x in args.prompt_tokens.split(",")]
    response_lengths = [int(x) for x in args.response_lengths.split(",")]
    groups = []
    for number in range(num_ranks * args.prompts_per_rank):
        prompt = rng.integers(0, config.model.vocab_size, prompt_lengths[number % len(prompt_lengths)])
        branches = [Branch(rng.integers(0, config.model.vocab_size, length)) for length in response_lengths]
        groups.append(PromptGroup(prompt, branches, group_id=number))
    return [groups[rank :: num_ranks] for rank in range(num_ranks)]


def token_weights(groups: list[PromptGroup], seed: int) -> dict[tuple[int, int], np.ndarray]:
    """Random dL/dlogp by (group id, branch): every token its own, so that no two can be confused."""
    rng = np.random.default_rng(seed + 1)
    ordered = sorted(groups, key=lambda group: group.group_id)
    return {
        (group.group_id, index): rng.standard_normal(branch.num_tokens).astype(np.float32)
        for group in ordered
        for index, branch in enumerate(group.branches)
    }


def detached_tokens(config: Config, group: PromptGroup) -> int:
    """How many leading tokens the oracle cuts from the graph for this prefix_grad."""
    prefix = config.prefix
    num_chunks = -(-group.num_prefix_tokens // prefix.prefix_chunk_tokens)
    return min((num_chunks - prefix.num_chunks_walked_back(num_chunks)) * prefix.prefix_chunk_tokens, group.num_prefix_tokens)


def oracle(config: Config, groups: list[PromptGroup], weights: dict, cache: Path | None) -> dict:
    """Run the oracle in a clean process, or find its answer in the cache."""
    neutral = {section: getattr(config, section) for section in ("model", "rollout", "run")}
    overrides = {k: v for part in neutral.values() for k, v in vars(part).items()} | ORACLE_LAYOUT
    samples = [
        {
            "prompt": torch.from_numpy(group.prompt_ids),
            "response": torch.from_numpy(branch.response_ids),
            "weights": torch.from_numpy(weights[group.group_id, index]),
            "detach": detached_tokens(config, group),
        }
        for group in groups
        for index, branch in enumerate(group.branches)
        if branch.num_tokens
    ]
    case = {"config": to_toml(load_config([], overrides).resolve()), "perturb_seed": config.run.seed, "samples": samples}
    with tempfile.TemporaryDirectory() as folder:
        case_file = Path(folder) / "case.pt"
        torch.save(case, case_file)
        name = hashlib.blake2b(repr(case).encode() + case["config"].encode(), digest_size=12).hexdigest()
        output = (cache or Path(folder)) / f"{name}.pt"
        if not output.exists():
            output.parent.mkdir(parents=True, exist_ok=True)
            _run_oracle(case_file, output)
        return torch.load(output)


def _run_oracle(case_file: Path, output: Path) -> None:
    distributed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC")
    env = {key: value for key, value in os.environ.items() if not key.startswith(distributed)}
    partial = output.with_suffix(f".{os.getpid()}")
    command = [sys.executable, str(Path(__file__).with_name("full_sequence_oracle.py")), str(case_file), str(partial)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the oracle failed:\n{done.stderr[-4000:]}")
    partial.rename(output)


def step_gradients(policy: Policy, batches: list[PromptBatch | None], weights: dict) -> tuple[dict, dict]:
    """Gradients by shard key and replay log-probs by (group id, branch), through the product's own calls."""
    policy.zero_grad()
    logprobs: dict = {}
    for batch in batches:
        table = _batch_weights(batch, weights)
        if policy.config.prefix.schedule == "full":
            result, _ = full_sequences(policy, batch, table)
        else:
            store = capture(policy, batch)
            scored, _ = score(policy, store, batch)
            result, _ = replay(policy, store, batch, table)
            assert all(np.array_equal(scored[place], result[place]) for place in result), "score and replay differ"
            prefix_backward(policy, store, batch)
        logprobs |= {(batch.groups[prompt].group_id, branch): values for (prompt, branch), values in result.items()}
    policy.finalize_gradients()
    grads = {}
    for shard, parameter in named_shards(policy.chunks, policy.config.model):
        grads[shard.key] = (shard, parameter.main_grad.detach().float().clone())
    return grads, logprobs


def _batch_weights(batch: PromptBatch | None, weights: dict) -> Table | None:
    if batch is None:
        return {}
    return {
        (prompt, index): weights[group.group_id, index]
        for prompt, group in enumerate(batch.groups)
        for index in range(len(group.branches))
    }


def compare(grads: dict, other: dict, reference: dict) -> dict:
    """Errors of all ranks' shards against the oracle, by whole parameter; replicas count by their worst."""
    local = {}
    for key, (shard, grad) in grads.items():
        truth = shard.cut(reference["grads"][shard.name]).float()
        rival = other[key][1]
        local[key] = [
            float((grad - truth).double().square().sum()),
            float(truth.double().square().sum()),
            float((rival * grad).double().sum()),
            float(rival.double().square().sum()),
            float(grad.double().square().sum()),
        ]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, local)
    shards: dict = {}
    for part in everyone:
        for key, sums in part.items():
            if key not in shards or not sums[0] <= shards[key][0]:
                shards[key] = sums
    params: dict[str, np.ndarray] = {}
    for (name, _), sums in shards.items():
        params[name] = params.get(name, 0) + np.array(sums)
    total = np.sqrt(sum(sums[1] for sums in params.values()))
    errors = {}
    for name, (err2, ref2, *_) in params.items():
        norm = np.sqrt(ref2)
        errors[name] = float(np.sqrt(err2) / (total if norm < NEGLIGIBLE * total else norm))
    worst = max(errors, key=lambda name: np.inf if np.isnan(errors[name]) else errors[name])
    sums = sum(params.values())
    return {
        "worst_param_rel_err": errors[worst],
        "worst_param": worst,
        "cosine_frozen_vs_exact": float(sums[2] / np.sqrt(sums[3] * sums[4])) if sums[3] * sums[4] > 0 else float("nan"),
        "grad_norm": float(total),
        "num_params": len(errors),
    }


def check(config: Config, args: argparse.Namespace) -> dict:
    layout = parallel.initialize(config)
    torch.set_num_threads(1)
    policy = Policy(config, layout)
    perturb(policy.chunks, config.model, config.run.seed)
    policy.weights_changed()
    per_rank = make_groups(config, args, layout.dp_size)
    all_groups = sorted((group for groups in per_rank for group in groups), key=lambda group: group.group_id)
    weights = token_weights(all_groups, config.run.seed)
    reference = [oracle(config, all_groups, weights, args.oracle_cache) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(reference, src=0)
    batches = batch_prompts(per_rank[layout.dp_rank], config.prefix.prompts_per_microbatch)
    most = [None] * dist.get_world_size()
    dist.all_gather_object(most, len(batches))
    batches += [None] * (max(most) - len(batches)) if layout.ep_size > 1 else []
    grads, logprobs = step_gradients(policy, batches, weights)
    frozen_policy_config = replace(config, prefix=replace(config.prefix, prefix_grad="frozen", prefix_out_tier="none"))
    rival = grads
    if config.prefix.schedule == "branch":
        policy.config = frozen_policy_config
        rival, _ = step_gradients(policy, batches, weights)
    result = compare(grads, rival, reference[0])
    result["max_logprob_diff"] = _worst_logprob(all_groups, logprobs, reference[0]["logprobs"])
    result["layout"] = layout.describe()
    result["prefix_grad"] = config.prefix.prefix_grad
    result["ok"] = result["worst_param_rel_err"] <= args.tolerance
    return result


def _worst_logprob(groups: list[PromptGroup], logprobs: dict, reference: list[torch.Tensor]) -> float:
    places = [(g.group_id, i) for g in groups for i, branch in enumerate(g.branches) if branch.num_tokens]
    own = max(
        (float(np.abs(logprobs[place] - truth.numpy()).max()) for place, truth in zip(places, reference) if place in logprobs),
        default=0.0,
    )
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return max(everyone)


def main() -> int:
    try:
        config, args = parse()
        result = check(config, args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if dist.get_rank() == 0:
        if args.json:
            print(json.dumps(result))
        else:
            print("\n".join(f"{key:24} {value}" for key, value in result.items()))
    dist.barrier()
    dist.destroy_process_group()
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
