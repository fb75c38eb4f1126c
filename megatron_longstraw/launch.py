"""Starting a run: what launch/pretrain_rl_longctx.sh leaves to Python.

    python -m megatron_longstraw.launch PROGRAM [FLAGS]        # PROGRAM: a module, or a file

On a rank (RANK and WORLD_SIZE are set, as torchrun does) this process becomes the program. Elsewhere it becomes a
torchrun of the program, with a rank for each GPU of this machine or two on the CPU; inside a Slurm job, with this
node's part in the meeting of all nodes. A configuration that cannot run ends here, once, before ranks start.
"""
from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Mapping, Sequence

from megatron_longstraw import slurm
from megatron_longstraw.config import Config, ConfigError, check, parse_args
from megatron_longstraw.planner.plan import plan
from megatron_longstraw.user_errors import report

CPU_RANKS = 2
LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
"""Where none of these is given, all ranks share each prompt."""


def start(program: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str] | str:
    """What a command line comes to: the command to become, or under --dry-run (or DRY_RUN=1) the plan.

    Raises:
        ConfigError, SlurmError, FolderError: it cannot run.
    """
    is_rank = "RANK" in environ and "WORLD_SIZE" in environ
    own = _own_flags(is_rank)
    options, flags = own.parse_known_args(argv)
    # Parsed again with all flags known, which is what finds unknown ones and prints --help.
    config, _ = parse_args(argv, extra=_all_flags(own))
    dry_run = options.dry_run or environ.get("DRY_RUN", "0") not in ("", "0")
    if options.world_size is not None and not dry_run:
        raise ConfigError([f"got --world-size {options.world_size} without --dry-run, which alone can plan for other machines"])
    ranks_here = 0 if is_rank or options.world_size else _ranks_here(options.nproc_per_node, dry_run)
    world_size = options.world_size or _world_size(environ, options, ranks_here, is_rank)
    if not config.given & set(LAYOUT):
        flags += ["--context-parallel-size", str(world_size)]
        parallel = dataclasses.replace(config.parallel, context_parallel_size=world_size)
        config = dataclasses.replace(config, parallel=parallel)
    if environ.get("RANK", "0") == "0":  # for all ranks: while it is not content, the others wait for it
        checked = _checked(config, world_size)
        if dry_run:
            return plan(checked, world_size)
        _check_prompts(config)
    if dry_run:
        return ""
    if is_rank:
        return [sys.executable, "-u", *_named(program), *flags]
    meeting = _meeting(environ, options, ranks_here)
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks_here}", *meeting, *_named(program), *flags]


def _own_flags(is_rank: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    group = parser.add_argument_group("launch", "How many ranks, and where they meet.")
    group.add_argument("--dry-run", action="store_true", help="print the plan and stop, as DRY_RUN=1 does")
    group.add_argument("--world-size", type=int, metavar="N", help="with --dry-run: plan for N ranks, here or elsewhere")
    if is_rank:  # torchrun has taken these
        parser.set_defaults(nproc_per_node=None, nnodes=None, master_addr=None, master_port=None)
        return parser
    group.add_argument("--nproc-per-node", type=int, metavar="N", help=f"ranks here (default: the GPUs, else {CPU_RANKS})")
    group.add_argument("--nnodes", type=int, metavar="N", help="nodes, in a Slurm job only (default: all of it)")
    group.add_argument("--master-addr", metavar="HOST", help="default: MASTER_ADDR, else the first node")
    group.add_argument("--master-port", metavar="PORT", help="default: MASTER_PORT, else by the job's number, else a free one")
    return parser


def _all_flags(own: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pretrain_rl_longctx.sh", parents=[own], usage="%(prog)s [--FLAG VALUE ...]")
    for flag in ("--warmup-curriculum", "--warmup-lr"):
        parser.add_argument(flag, help="of the quickstart (examples/needle/train.py), which runs when no prompts are named")
    return parser


def _ranks_here(given: int | None, dry_run: bool) -> int:
    if given is not None and given < 1:
        raise ConfigError([f"got --nproc-per-node {given}, need at least 1"])
    if given is not None and dry_run:
        return given
    import torch

    gpus = torch.cuda.device_count()
    if given is not None and gpus and given > gpus:
        raise ConfigError([f"got --nproc-per-node {given} on a machine with {gpus} GPUs, need at most that"])
    if not gpus and not dry_run:
        print(f"no GPU found: {given or CPU_RANKS} ranks on the CPU", flush=True)
    return given or gpus or CPU_RANKS


def _world_size(environ: Mapping[str, str], options: argparse.Namespace, ranks_here: int, is_rank: bool) -> int:
    if is_rank:
        return int(environ["WORLD_SIZE"])
    if slurm.in_job(environ):
        return ranks_here * slurm.rendezvous(environ, num_nodes=options.nnodes).num_nodes
    if options.nnodes not in (None, 1):
        raise ConfigError(
            [
                f"got --nnodes {options.nnodes} outside a Slurm job; start torchrun with it on each node: "
                f"torchrun --nnodes {options.nnodes} ... launch/pretrain_rl_longctx.sh"
            ]
        )
    return ranks_here


def _checked(config: Config, world_size: int) -> Config:
    """The resolved configuration with the model of --hf-checkpoint in it."""
    if config.checkpoint.hf_checkpoint is not None:
        from megatron_longstraw.convert.adopt import check_window, open_folder, with_model_of

        folder = open_folder(config)
        config = with_model_of(config, folder)
        check_window(config, folder)
    check(config, world_size)
    return config.resolve()


def _check_prompts(config: Config) -> None:
    if not (config.run.prompt_function or config.data.train_files or config.data.rollout_file):
        raise ConfigError(["no prompts; name --train-files, or a source with --prompt-function module:function"])


def _meeting(environ: Mapping[str, str], options: argparse.Namespace, ranks_here: int) -> list[str]:
    if slurm.in_job(environ):
        slurm.check_one_task_per_node(environ)
        node = slurm.rendezvous(
            environ, num_nodes=options.nnodes, master_addr=options.master_addr, master_port=options.master_port
        )
        return node.torchrun_flags()
    port = slurm.choose_port(environ, options.master_port, default="")
    if not port:
        return ["--standalone"]
    return slurm.Rendezvous(1, 0, options.master_addr or environ.get("MASTER_ADDR") or "127.0.0.1", port).torchrun_flags()


def _named(program: str) -> list[str]:
    return [program] if program.endswith(".py") else ["-m", program]


def main(argv: Sequence[str]) -> int:
    try:
        result = start(argv[0], argv[1:], os.environ)
    except ValueError as error:
        report(error)
        return 1
    if isinstance(result, list):
        os.execv(result[0], result)
    print(result, end="\n" if result else "")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
