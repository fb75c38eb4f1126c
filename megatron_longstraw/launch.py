"""Starting a run: what launch/pretrain_rl_longctx.sh leaves to Python.

    python -m megatron_longstraw.launch PROGRAM [FLAGS]        # PROGRAM: a module, or a file

On a rank (RANK and WORLD_SIZE are set, as torchrun does) this process becomes the program. Elsewhere it becomes a
torchrun of the program, with a rank for each GPU of this machine or two on the CPU; inside a Slurm job, with this
node's part in the meeting of all nodes. A configuration that cannot run ends here, once, before ranks start.

That torchrun (agent.py) hands USR1 on to its ranks. One that was started by hand dies of it, and its ranks with it;
`python -m megatron_longstraw.agent` in its place does not.
"""
from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Mapping, Sequence

from megatron_longstraw import slurm
from megatron_longstraw.config import Config, ConfigError, check, parse_args
from megatron_longstraw.planner.chunks import with_chunk_tokens
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
    options.dry_run |= environ.get("DRY_RUN", "0") not in ("", "0")
    # Parsed again with all flags known, which is what finds unknown ones and prints --help.
    config, _ = parse_args(argv, extra=_all_flags(own))
    ranks_here, world_size = _count_ranks(options, environ, is_rank)
    if not config.given & set(LAYOUT):
        flags += ["--context-parallel-size", str(world_size)]
        parallel = dataclasses.replace(config.parallel, context_parallel_size=world_size)
        config = dataclasses.replace(config, parallel=parallel)
    _check_goes_on(config, environ)
    if environ.get("RANK", "0") == "0":  # for all: while it is not content, the other ranks wait for it
        checked = _checked(config, world_size)
        if options.dry_run:
            return plan(checked, world_size)
        check_prompts(config)
    if options.dry_run:
        return ""
    program_and_flags = [*([program] if program.endswith(".py") else ["-m", program]), *flags]
    if is_rank:
        return [sys.executable, "-u", *program_and_flags]
    torchrun = [sys.executable, "-m", "megatron_longstraw.agent", f"--nproc-per-node={ranks_here}"]
    return [*torchrun, *_meeting(options, environ), *program_and_flags]


def _own_flags(is_rank: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.set_defaults(nproc_per_node=None, nnodes=None, master_addr=None, master_port=None)
    group = parser.add_argument_group("launch", "How many ranks, and where they meet.")
    group.add_argument("--dry-run", action="store_true", help="print the plan and stop, as DRY_RUN=1 does")
    group.add_argument("--world-size", type=int, metavar="N", help="with --dry-run: ranks to plan for, here or not")
    if not is_rank:  # torchrun has taken these
        group.add_argument("--nproc-per-node", type=int, metavar="N", help="ranks here (default: the GPUs, else two)")
        group.add_argument("--nnodes", type=int, metavar="N", help="nodes, in a Slurm job only (default: all of it)")
        group.add_argument("--master-addr", metavar="HOST", help="default: MASTER_ADDR, else the first node")
        group.add_argument("--master-port", metavar="PORT", help="default: MASTER_PORT, else by the job, or a free one")
    return parser


def _all_flags(own: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pretrain_rl_longctx.sh", parents=[own], usage="%(prog)s [--FLAG VALUE ...]")
    for flag in ("--warmup-curriculum", "--warmup-lr"):
        parser.add_argument(flag, help="of the quickstart, which runs when no prompts are named")
    return parser


def _count_ranks(options: argparse.Namespace, environ: Mapping[str, str], is_rank: bool) -> tuple[int, int]:
    """(ranks that a torchrun here would start, ranks of the world)."""
    if options.world_size is not None:
        if not options.dry_run:
            raise ConfigError([f"got --world-size {options.world_size} without --dry-run, which alone plans for more"])
        return 0, options.world_size
    if is_rank:
        return 0, int(environ["WORLD_SIZE"])
    ranks_here = _ranks_here(options)
    if slurm.in_job(environ):
        return ranks_here, ranks_here * slurm.rendezvous(environ, num_nodes=options.nnodes).num_nodes
    if options.nnodes not in (None, 1):
        how = f"torchrun --nnodes {options.nnodes} ... launch/pretrain_rl_longctx.sh on each node"
        raise ConfigError([f"got --nnodes {options.nnodes} outside a Slurm job; start {how}"])
    return ranks_here, ranks_here


def _ranks_here(options: argparse.Namespace) -> int:
    given = options.nproc_per_node
    if given is not None and given < 1:
        raise ConfigError([f"got --nproc-per-node {given}, need at least 1"])
    if given is not None and options.dry_run:
        return given
    import torch

    gpus = torch.cuda.device_count()
    if given is not None and gpus and given > gpus:
        raise ConfigError([f"got --nproc-per-node {given} on a machine with {gpus} GPUs, need at most that"])
    if not gpus and not options.dry_run:
        print(f"no GPU found: {given or CPU_RANKS} ranks on the CPU", flush=True)
    return given or gpus or CPU_RANKS


def _checked(config: Config, world_size: int) -> Config:
    """The resolved configuration with the model of --hf-checkpoint, and chunks that fit, in it."""
    if config.checkpoint.hf_checkpoint is not None:
        from megatron_longstraw.convert.adopt import check_window, open_folder, with_model_of

        folder = open_folder(config)
        config = with_model_of(config, folder)
        check_window(config, folder)
    check(config, world_size)
    return with_chunk_tokens(config.resolve(), world_size)


def check_prompts(config: Config) -> None:
    """Raises:
    ConfigError: no prompts and no rollouts are named.
    """
    if not (config.run.prompt_function or config.data.train_files or config.data.rollout_file):
        raise ConfigError(["no prompts; name --train-files, or a source with --prompt-function module:function"])


def _check_goes_on(config: Config, environ: Mapping[str, str]) -> None:
    if environ.get(slurm.REQUEUED) and config.checkpoint.save is None:
        raise ConfigError(["no --save, without which a requeued job would begin again each time; name a folder"])


def _meeting(options: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    if slurm.in_job(environ):
        slurm.check_one_task_per_node(environ)
        return slurm.rendezvous(
            environ, num_nodes=options.nnodes, master_addr=options.master_addr, master_port=options.master_port
        ).torchrun_flags()
    port = slurm.choose_port(environ, options.master_port, default="")
    if not port:
        return ["--standalone"]
    address = options.master_addr or environ.get("MASTER_ADDR") or "127.0.0.1"
    return slurm.Rendezvous(1, 0, address, port).torchrun_flags()


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
