"""Likeliest answers of a model to held-out prompts, and how many are right.

    python examples/smollm2_needle/evaluate.py --config examples/smollm2_needle/smollm2.toml \\
        --hf-checkpoint FOLDER --train-files heldout.jsonl --answers answers.jsonl

Prompts run once and are answered from the prefix state, as in training; with --transformers, the model is loaded and
answers there. Takes every training flag, and runs under torchrun as training does. Two implementations give the same
answers in float32 (--no-bf16); in bfloat16 near ties fall either way.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from examples.smollm2_needle.task import score
from megatron_longstraw.config import Config, parse_args
from megatron_longstraw.convert.adopt import open_folder, with_model_of
from megatron_longstraw.data.file_task import FileTask, row_id
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.calls import capture
from megatron_longstraw.mcore.packing import batch_prompts
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.rollout.generate import generate
from megatron_longstraw.train import exit_status
from megatron_longstraw.types import PromptGroup

NEARLY_GREEDY = 1e-4
"""A temperature at which only ties are left to chance."""


def own_answers(policy: Policy, task: FileTask, groups: list[PromptGroup]) -> list[str]:
    """By this project: capture, then one response per prompt."""
    for batch in batch_prompts(groups, 1):
        store = capture(policy, batch, walk_back=False)
        generate(policy, store, batch, step=0)
        store.release()
    # Batches bring prompts of equal length together, so their order is not that of the groups.
    return [task.render(group.branches[0].response_ids) for group in groups]


def transformers_answers(config: Config, task: FileTask, groups: list[PromptGroup]) -> list[str]:
    """By transformers, from the folder alone."""
    import transformers

    transformers.logging.disable_progress_bar()
    dtype = torch.bfloat16 if config.model.bf16 else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(config.checkpoint.hf_checkpoint, dtype=dtype)
    answers = []
    for group in groups:
        ids = torch.from_numpy(group.prompt_ids)[None]
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=config.rollout.max_response_length,
        )
        answers.append(task.render(output[0, ids.shape[1] :].numpy()))
    return answers


def evaluate(config: Config, by_transformers: bool, num_prompts: int | None = None) -> list[dict]:
    """One row per prompt (of the first `num_prompts`), in the order of the file: id, answer, ground_truth, and what
    `score` says."""
    folder = open_folder(config)
    config = with_model_of(config, folder).resolve()
    layout = parallel.initialize(config)
    task = FileTask.from_config(config)
    groups = task.prompts(0, len(task.kept))[:num_prompts]
    own = groups[layout.dp_rank :: layout.dp_size]
    if by_transformers:
        answers = transformers_answers(config, task, own)
    else:
        answers = own_answers(Policy(config, layout, folder), task, own)
    parts: list[list[str]] = [answers]
    if layout.dp_size > 1:
        parts = [[]] * layout.dp_size
        dist.all_gather_object(parts, answers, group=layout.groups.dp)
    return [
        {
            "id": row_id(group.group_id),
            "answer": answer,
            "ground_truth": group.ground_truth,
            "score": score(group.data_source, answer, group.ground_truth, group.extra_info),
        }
        for number, group in enumerate(groups)
        for answer in [parts[number % layout.dp_size][number // layout.dp_size]]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True, help="JSONL to write: one line per prompt")
    parser.add_argument("--transformers", action="store_true", help="answer with transformers")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="answer the first N only")
    parser.add_argument("--compare", type=Path, help="such a JSONL to count equal answers in")
    config, args = parse_args(extra=parser)
    rollout = dataclasses.replace(config.rollout, group_size=1, temperature=NEARLY_GREEDY)
    data = dataclasses.replace(config.data, shuffle=False)
    begin = time.perf_counter()
    rows = evaluate(dataclasses.replace(config, rollout=rollout, data=data), args.transformers, args.num_prompts)
    if dist.get_rank() == 0:
        args.answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
        right = int(sum(row["score"] for row in rows))
        engine = "transformers" if args.transformers else "this project"
        seconds = time.perf_counter() - begin
        print(f"{right} of {len(rows)} answers are right, by {engine} in {seconds:.0f} s{same(args, rows)}")


def same(args: argparse.Namespace, rows: list[dict]) -> str:
    if args.compare is None:
        return ""
    others = [json.loads(line)["answer"] for line in args.compare.read_text().splitlines()]
    equal = sum(row["answer"] == other for row, other in zip(rows, others, strict=True))
    return f"; {equal} are those of {args.compare}"


if __name__ == "__main__":
    sys.exit(exit_status(main))
