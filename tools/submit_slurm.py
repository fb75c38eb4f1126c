"""Submit training to Slurm, once the training flags are known to be good for that many ranks.

    python tools/submit_slurm.py --nodes 2 --time 12:00:00 --partition gpu -- --config my_run.toml --save runs/mine/save

Fills in launch/slurm/pretrain_rl_longctx.sbatch and hands it to sbatch; prints the job's number. Training flags are
those of launch/pretrain_rl_longctx.sh. --dry-run prints the script, and the plan on stderr, and submits nothing.
"""
from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Container, Sequence

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_longstraw import launch, slurm
from megatron_longstraw.config import parse_args

SCRIPT = ROOT / "launch/slurm/pretrain_rl_longctx.sbatch"
PASSED_ON = ("cpus-per-task", "mem", "partition", "account", "qos", "job-name", "output")
"""sbatch's flags as they are; not given: what the script says, else the cluster's default."""
MAX_SIGNAL_MINUTES = 65535 // 60
TIMES = (r"(?P<m>\d+)", r"(?P<m>\d+):(?P<s>\d+)", r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)",
         r"(?P<d>\d+)-(?P<h>\d+)(:(?P<m>\d+)(:(?P<s>\d+))?)?")  # fmt: skip
"""Forms of a time that sbatch takes."""


class SubmitError(ValueError):
    """The job cannot be submitted; the message says what to change."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        allow_abbrev=False,
        usage="%(prog)s [--FLAG VALUE ...] -- TRAINING FLAGS",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="and as many ranks; 0: CPU ranks")
    parser.add_argument("--time", default="24:00:00", metavar="D-H:M:S", help="limit of one stay on the nodes")
    parser.add_argument("--signal-minutes", type=int, default=10, metavar="N", help="how long before it ranks must stop")
    for name in PASSED_ON:
        parser.add_argument(f"--{name}", help="as sbatch's")
    parser.add_argument("--container-image", help="run the ranks in it (srun needs pyxis)")
    parser.add_argument("--container-mounts", help="for the container")
    parser.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")
    return parser


def check_options(options: argparse.Namespace) -> None:
    for name, least in (("nodes", 1), ("gpus_per_node", 0), ("signal_minutes", 1)):
        if getattr(options, name) < least:
            raise SubmitError(f"got --{name.replace('_', '-')} {getattr(options, name)}, need at least {least}")
    limit_s = seconds(options.time)
    # Slurm would send the signal at the start, and the job would go around for ever.
    if 60 * options.signal_minutes >= limit_s or options.signal_minutes > MAX_SIGNAL_MINUTES:
        most = min(MAX_SIGNAL_MINUTES, (limit_s - 1) // 60)
        given = f"--signal-minutes {options.signal_minutes} with --time {options.time}"
        raise SubmitError(f"got {given}, need at most {most}")
    if options.container_mounts and not options.container_image:
        raise SubmitError(f"got --container-mounts {options.container_mounts} without --container-image")
    for name, value in vars(options).items():
        if isinstance(value, str) and re.search(r'["\\\n]', value):
            raise SubmitError(f"got --{name.replace('_', '-')} {value!r}, need one line without quotes and backslashes")


def seconds(time: str) -> int:
    """Of a time as sbatch takes it."""
    for form in TIMES:
        if match := re.fullmatch(form, time):
            parts = {unit: int(number or 0) for unit, number in match.groupdict().items()}
            return 86400 * parts.get("d", 0) + 3600 * parts.get("h", 0) + 60 * parts.get("m", 0) + parts.get("s", 0)
    raise SubmitError(f"got --time {time!r}, need MINUTES, M:S, H:M:S, D-H, D-H:M or D-H:M:S")


def with_ranks(flags: Sequence[str], gpus_per_node: int) -> list[str]:
    """The training flags, with the ranks of a node among them."""
    if any(flag.partition("=")[0] == "--nproc-per-node" for flag in flags):
        return [*flags]
    return [*flags, "--nproc-per-node", str(gpus_per_node or launch.CPU_RANKS)]


def plan(flags: Sequence[str], nodes: int) -> str:
    """What the job would run, by the launch's own rules.

    Raises:
        ConfigError, SlurmError, FolderError: it would not.
    """
    job = {
        "SLURM_JOB_ID": "0",
        "SLURM_JOB_NODELIST": f"n[1-{nodes}]",
        "SLURM_NNODES": str(nodes),
        "MASTER_ADDR": "n1",
        slurm.REQUEUED: "1",
    }
    text = launch.start("megatron_longstraw.train", [*flags, "--dry-run"], job)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--nproc-per-node")
    for name in ("--nnodes", "--master-addr", "--master-port"):
        parser.add_argument(name)
    launch.check_prompts(parse_args(flags, extra=parser)[0])
    return text


def render(options: argparse.Namespace, flags: Sequence[str]) -> str:
    """The batch script with what was asked for in it."""
    header, body = SCRIPT.read_text().split("set -euo pipefail\n", 1)
    asked = {"nodes": options.nodes, "time": options.time, "signal": f"B:USR1@{60 * options.signal_minutes}"}
    asked |= {"gpus-per-node": options.gpus_per_node or None}
    asked |= {name: value for name in PASSED_ON if (value := getattr(options, name.replace("-", "_"))) is not None}
    lines = [line for line in header.splitlines() if not _sets(line, asked)]
    # Quotes, because sbatch splits these lines at spaces.
    lines += [f'#SBATCH "--{name}={value}"' for name, value in asked.items() if value is not None]
    lines += ["set -euo pipefail", f"LONGSTRAW_ROOT={shlex.quote(str(ROOT))}"]
    for name in ("container_image", "container_mounts"):
        if getattr(options, name):
            lines.append(f"{name.upper()}={shlex.quote(getattr(options, name))}")
    lines.append(f"set -- {shlex.join(flags)}")
    return "\n".join(lines) + "\n" + body


def _sets(line: str, names: Container[str]) -> bool:
    match = re.match(r"#SBATCH --([\w-]+)", line)
    return match is not None and match[1] in names


def submit(script: str) -> str:
    """The job's number.

    Raises:
        SubmitError: there is no sbatch here, or it refuses.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise SubmitError("no sbatch on this machine; submit where Slurm is installed, or look with --dry-run")
    done = subprocess.run([sbatch, "--parsable"], input=script, capture_output=True, text=True)
    if done.returncode != 0:
        raise SubmitError(f"sbatch refuses: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    split = argv.index("--") if "--" in argv else len(argv)
    options, flags = make_parser().parse_known_args(argv[:split])
    try:
        check_options(options)
        flags = with_ranks([*flags, *argv[split + 1 :]], options.gpus_per_node)
        planned = plan(flags, options.nodes)
        script = render(options, flags)
        if options.dry_run:
            print(planned, file=sys.stderr)
            print(script, end="")
        else:
            print(submit(script))
    except ValueError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
