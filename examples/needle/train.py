"""Quickstart: a short supervised warm-up on short prompts, then GRPO by branch replay on long ones.

    torchrun --nproc-per-node 2 examples/needle/train.py --config examples/needle/quickstart.toml

The warm-up uses the same replay: its loss is that of a policy gradient with advantage 1 on the right answer. It
stops at an eighth of the final prompt length; RL does the rest. Takes every training flag.
"""
from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.needle.task import Needle, task
from megatron_longstraw.config import parse_args
from megatron_longstraw.gradients import Work, accumulate_gradients, in_step
from megatron_longstraw.interruption import StopRequest
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.optimizer import PolicyOptimizer
from megatron_longstraw.mcore.packing import batch_prompts
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.objectives.policy_loss import PolicyObjective
from megatron_longstraw.mcore.training_state import TrainingState, find_start
from megatron_longstraw.planner.chunks import with_chunk_tokens
from megatron_longstraw.run_log import RunLog
from megatron_longstraw.sources import training_source
from megatron_longstraw.train import check_folders, exit_status, print_summary, train

CURRICULUM = "16:100:64,32:40:64,64:20:32,128:8:16"


def warm_up(policy: Policy, curriculum: str, lr: float, log: RunLog) -> None:
    """Supervised steps on answered prompts. `curriculum`: length:steps:prompts per step, comma separated."""
    config = policy.config
    policy.config = replace(config, optimizer=replace(config.optimizer, lr=lr, min_lr=0.0, lr_decay_style="constant"))
    optimizer, objective = PolicyOptimizer(policy), PolicyObjective()
    policy.config = config
    begin, step = time.perf_counter(), 0
    for stage in curriculum.split(","):
        num_tokens, num_steps, num_prompts = map(int, stage.split(":"))
        source = Needle(num_tokens, config.run.seed)
        for _ in range(num_steps):
            own = source.answered(step, num_prompts)[policy.layout.dp_rank :: policy.layout.dp_size]
            work = [
                Work(batch, {(prompt, 0): 1.0 for prompt in range(batch.num_prompts)} if batch else {})
                for batch in in_step(policy, batch_prompts(own, num_prompts))
            ]
            metrics = accumulate_gradients(policy, work, objective).to_means()
            optimizer.step()
            step += 1
        log.say(
            f"warm-up    {num_tokens:>4}-token prompts, {num_steps} steps of {num_prompts}: "
            f"entropy {metrics['actor/entropy']:.2f}, {time.perf_counter() - begin:.0f} s so far"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warmup-curriculum", default=CURRICULUM, help="length:steps:prompts per step, comma separated")
    parser.add_argument("--warmup-lr", type=float, default=3e-3)
    config, args = parse_args(extra=parser)
    config = config.resolve()
    check_folders(config, None)
    layout = parallel.initialize(config)
    config = with_chunk_tokens(config, dist.get_world_size())
    source = training_source(config, task(config))
    start = find_start(config.checkpoint)
    policy = Policy(config, layout, checkpoint=start.checkpoint)
    log = RunLog(policy.config, active=dist.get_rank() == 0, first_step=start.steps)
    log.say(
        f"layout     {policy.describe()}; prompts of {config.rollout.max_prompt_length} tokens, "
        f"{config.rollout.group_size} responses each"
    )
    begin = time.perf_counter()
    if start.checkpoint is None:
        warm_up(policy, args.warmup_curriculum, args.warmup_lr, log)
    optimizer = PolicyOptimizer(policy)
    state = TrainingState(policy, optimizer)
    progress = state.restore(start)
    for note in start.notes:
        log.say(f"checkpoint {note}")
    stop = StopRequest()
    stop.listen()
    summary = train(policy, source, log, optimizer, state, progress, stop)
    print_summary(log, config, summary)
    log.say(f"time       {time.perf_counter() - begin:.0f} s of training, warm-up included")
    log.close()


if __name__ == "__main__":
    sys.exit(exit_status(main))
