"""Compare one step's gradients, in any layout, with plain autograd of the stock model over full sequences.

    torchrun --nproc-per-node 2 tools/check_gradients.py --context-parallel-size 2 --json
    torchrun --nproc-per-node 4 tools/check_gradients.py --tensor-model-parallel-size 2 --sequence-parallel \\
        --pipeline-model-parallel-size 2 --recompute-granularity full --arch moe --json

Takes every training flag; the model is tiny unless flags say otherwise. The oracle (full_sequence_oracle.py) runs
in a process of its own without any parallelism. Prints one JSON object on rank 0:

    worst_param_rel_err     largest ||dg|| / ||g|| of a parameter; one whose ||g|| is under 1e-6 of the whole
                            gradient's is judged against the whole
    max_logprob_diff        replay against the oracle
    score_equals_replay     log-probs of the two calls are equal to the last bit
    max_decode_diff         log-probs recorded while sampling against score of the sampled ids
    cosine_frozen_vs_exact  of the whole gradients, both computed here

and exits 1 when the error is over --tolerance. With --bf16 the oracle stays float32 and the error is judged by that
of the stock model in bfloat16: `rel_err` (whole gradient) may be at most 1.5 times `stock_bf16_rel_err`.
"""
from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from full_sequence_oracle import perturb
from gradient_case import GradientCase, TokenWeights, ask_oracle, make_case, parse

from megatron_longstraw.gradients import in_step
from megatron_longstraw.config import Config, ConfigError
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.calls import Table, capture, full_sequences, prefix_backward, replay, score
from megatron_longstraw.mcore.packing import PromptBatch, batch_prompts
from megatron_longstraw.mcore.parameters import ParameterShard, named_shards
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.rollout.generate import generate
from megatron_longstraw.types import PromptGroup
from megatron_longstraw.user_errors import report

NEGLIGIBLE = 1e-6
BF16_FACTOR = 1.5
Gradients = dict[tuple, tuple[ParameterShard, torch.Tensor]]


def step_gradients(policy: Policy, batches: list[PromptBatch | None], weights: TokenWeights) -> tuple[Gradients, dict, bool]:
    """Gradients by shard, replay log-probs by (group id, branch), and whether score gave the very same."""
    policy.zero_grad()
    logprobs, same = {}, True
    for batch in batches:
        table = _weights_of(batch, weights)
        if policy.config.prefix.schedule == "full":
            result, _ = full_sequences(policy, batch, table)
        else:
            store = capture(policy, batch)
            scored, _ = score(policy, store, batch)
            result, _ = replay(policy, store, batch, table)
            same = same and all(np.array_equal(scored[place], values) for place, values in result.items())
            prefix_backward(policy, store, batch)
        logprobs |= {(batch.groups[prompt].group_id, branch): values for (prompt, branch), values in result.items()}
    policy.finalize_gradients()
    shards = named_shards(policy.chunks, policy.config.model)
    return {shard.key: (shard, p.main_grad.detach().float().clone()) for shard, p in shards}, logprobs, same


def _weights_of(batch: PromptBatch | None, weights: TokenWeights) -> Table:
    groups = batch.groups if batch else []
    return {(p, i): weights[group.group_id, i] for p, group in enumerate(groups) for i in range(len(group.branches))}


@contextlib.contextmanager
def other_mode(policy: Policy, prefix_grad: str):
    config = policy.config
    mode = replace(config.prefix, prefix_grad=prefix_grad, prefix_out_tier=None).resolve()
    policy.config = replace(config, prefix=mode)
    try:
        yield
    finally:
        policy.config = config


def parameter_errors(grads: Gradients, reference: dict[str, torch.Tensor]) -> tuple[dict[str, float], float]:
    """||dg|| / ||g|| by whole parameter, over the shards of all ranks, and the norm of the reference gradient.
    Replicas of a shard count by their worst, so that ranks which drifted apart show."""
    local = {}
    for key, (shard, grad) in grads.items():
        truth = shard.cut(reference[shard.name]).float()
        local[key] = (float((grad - truth).double().square().sum()), float(truth.double().square().sum()))
    squares: dict[str, np.ndarray] = {}
    for (name, _), pair in _over_ranks(local, worse=lambda a, b: not a[0] <= b[0]).items():
        squares[name] = squares.get(name, 0) + np.array(pair)
    total = np.sqrt(sum(pair[1] for pair in squares.values()))
    errors = {}
    for name, (error, norm) in squares.items():
        judge = total if np.sqrt(norm) < NEGLIGIBLE * total else np.sqrt(norm)
        errors[name] = float(np.sqrt(error) / judge) if judge > 0 else float(np.sqrt(error))
    return errors, float(total)


def cosine(a: Gradients, b: Gradients) -> float:
    dot, aa, bb = products(a, b)
    return dot / (aa * bb) ** 0.5


def products(a: Gradients, b: Gradients) -> tuple[float, float, float]:
    """a.b, a.a and b.b of whole gradients, each shard counted once."""
    local = {
        key: tuple(float((x * y).double().sum()) for x, y in ((a[key][1], b[key][1]), (a[key][1],) * 2, (b[key][1],) * 2))
        for key in a
    }
    return tuple(map(float, np.sum(list(_over_ranks(local, worse=lambda *_: False).values()), axis=0)))


def _over_ranks(local: dict, worse) -> dict:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, local)
    merged: dict = {}
    for part in everyone:
        for key, value in part.items():
            if key not in merged or worse(value, merged[key]):
                merged[key] = value
    return merged


def decode_difference(policy: Policy, batches: list[PromptBatch | None]) -> float:
    """Largest |log-prob while sampling - log-prob of the score call| on freshly sampled branches."""
    worst = 0.0
    for batch in batches:
        fresh = None if batch is None else PromptBatch([PromptGroup(g.prompt_ids, group_id=g.group_id) for g in batch.groups])
        store = capture(policy, fresh, walk_back=False)
        generate(policy, store, fresh, step=0)
        scored, _ = score(policy, store, fresh)
        for (prompt, index), values in scored.items():
            sampled = fresh.groups[prompt].branches[index].rollout_logprobs
            worst = max(worst, float(np.abs(sampled - values).max()))
    return _worst(worst)


def _worst(value: float) -> float:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return float(np.max(everyone))


def check(
    config: Config, case: GradientCase, layout: parallel.Layout, reference: dict, stock_bf16: dict | None, tolerance: float
) -> dict:
    policy = Policy(config, layout)
    perturb(policy.chunks, config.model, config.run.seed)
    policy.weights_changed()
    own = case.of_rank(layout.dp_rank, layout.dp_size)
    batches = in_step(policy, batch_prompts(own, config.prefix.prompts_per_microbatch))
    grads, logprobs, same = step_gradients(policy, batches, case.weights)
    errors, norm = parameter_errors(grads, reference["grads"])
    worst = max(errors, key=lambda name: np.inf if np.isnan(errors[name]) else errors[name])
    result = {
        "worst_param_rel_err": errors[worst],
        "worst_param": worst,
        "max_logprob_diff": _logprob_difference(case, logprobs, reference["logprobs"]),
        "layout": layout.describe(),
        "prefix_grad": config.prefix.prefix_grad,
        "grad_norm": norm,
    }
    if config.prefix.schedule == "branch":
        both = {}
        for mode in ("frozen", "exact"):
            with other_mode(policy, mode):
                both[mode] = step_gradients(policy, batches, case.weights)[0]
        result["cosine_frozen_vs_exact"] = cosine(both["frozen"], both["exact"])
        result["score_equals_replay"] = not _worst(float(not same))
        result["max_decode_diff"] = decode_difference(policy, batches)
    result["ok"] = result["worst_param_rel_err"] <= tolerance
    if stock_bf16 is not None:
        result["rel_err"] = whole_error(errors, reference["grads"], norm)
        result["stock_bf16_rel_err"] = _distance(stock_bf16["grads"], reference["grads"])
        result["ok"] = result["rel_err"] <= BF16_FACTOR * result["stock_bf16_rel_err"]
    return result


def whole_error(errors: dict[str, float], reference: dict[str, torch.Tensor], norm: float) -> float:
    """||dg|| / ||g|| of the whole gradient, from the per-parameter errors."""
    squares = 0.0
    for name, error in errors.items():
        own = float(reference[name].double().norm())
        squares += (error * (norm if own < NEGLIGIBLE * norm else own)) ** 2
    return float(np.sqrt(squares) / norm)


def _distance(grads: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    error = sum(float((grads[name] - truth).double().square().sum()) for name, truth in reference.items())
    return float(np.sqrt(error / sum(float(truth.double().square().sum()) for truth in reference.values())))


def _logprob_difference(case: GradientCase, logprobs: dict, reference: list[torch.Tensor]) -> float:
    places = [(group.group_id, i) for group in case.groups for i, branch in enumerate(group.branches) if branch.num_tokens]
    own = [
        float(np.abs(logprobs[place] - truth.numpy()).max())
        for place, truth in zip(places, reference)
        if place in logprobs
    ]
    return _worst(max(own, default=0.0))


def run_all(argvs: list[list[str]]) -> list[dict]:
    """Every case in turn, in this one start of the ranks."""
    parsed = [parse(argv, __doc__) for argv in argvs]
    torch.set_num_threads(1)
    cases = []
    for config, args in parsed:
        layout = parallel.initialize(config)
        cases.append(make_case(config, args, layout.dp_size))
    cache = parsed[0][1].oracle_cache
    answers = None
    if dist.get_rank() == 0:
        low = [case for case in cases if case.config.model.bf16]
        in_bf16 = dict(zip(map(id, low), ask_oracle(low, cache, bf16=True)))
        answers = [(truth, in_bf16.get(id(case))) for truth, case in zip(ask_oracle(cases, cache), cases)]
    answers = [answers]
    dist.broadcast_object_list(answers, src=0)
    results = []
    for (config, args), case, (reference, stock_bf16) in zip(parsed, cases, answers[0]):
        layout = parallel.initialize(config)
        results.append(check(config, case, layout, reference, stock_bf16, args.tolerance))
    return results


def main(argv: list[str]) -> int:
    try:
        _, args = parse(argv, __doc__)
        argvs = [argv]
        if args.cases:
            argvs = [flags + ["--oracle-cache", str(args.oracle_cache)] * bool(args.oracle_cache) for flags in json.loads(args.cases.read_text())]
        results = run_all(argvs)
    except ConfigError as error:
        report(error)
        return 2
    if dist.get_rank() == 0:
        if args.json:
            print(json.dumps(results if args.cases else results[0]))
        else:
            print("\n".join(f"{key:24} {value}" for result in results for key, value in result.items()))
    dist.barrier()
    dist.destroy_process_group()
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
