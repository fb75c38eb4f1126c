"""Every command of the documentation, typed where its placeholders are small real files: those that are quick run,
launches are planned by what would start them, other programs' are held against their flags."""
from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import bench_step
import calibrate
import check_gradients
import check_planner
import config_reference
import convert_hf
import fp8_error
import long_context_receipt
import plan_table
import pytest
import report
import scaling
import submit_slurm
import validate_data

from megatron_longstraw import doctor, launch, train
from megatron_longstraw.config import check, parse_args
from megatron_longstraw.planner import __main__ as planner
from tests.checkouts import environment, make_checkout
from tests.doc_pages import PAGES, ROOT, blocks, files
from tests.hf_models import make_whole_folder

SHOWN = files(ROOT / "docs/training.md")
SMALL = {"train_iters": 2, "train_batch_size": 2, "group_size": 2, "max_response_length": 4}
"""What the configuration that is shown has larger."""


@dataclass(frozen=True)
class Command:
    text: str
    environ: tuple[tuple[str, str], ...]
    words: tuple[str, ...]


def commands_of(text: str) -> list[Command]:
    """The commands of a block of bash."""
    found = []
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        words = shlex.split(line, comments=True)
        settings = [word for word in words if re.match(r"[A-Z_]+=", word)]
        settings = settings[: next((i for i, word in enumerate(words) if word not in settings), len(words))]
        if words:
            pairs = tuple(tuple(word.split("=", 1)) for word in settings)
            found.append(Command(line.partition("  #")[0].strip(), pairs, tuple(words[len(settings) :])))
    return found


COMMANDS = list({command: None for page in PAGES for block in blocks(page, "bash") for command in commands_of(block)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkout with what docs/training.md shows, after its run, on a tiny model with few and short responses."""
    folder = make_checkout(tmp_path_factory.mktemp("a checkout"))
    for name in ("models", "runs"):
        (folder / "launch" / name).symlink_to(ROOT / "launch" / name)
    make_whole_folder(folder / "DIR", max_position_embeddings=32768)
    for name, text in SHOWN.items():
        (folder / name).write_text(text)
    text = SHOWN["my_run.toml"]
    for name, value in SMALL.items():
        text, count = re.subn(rf"^{name} = \d+$", f"{name} = {value}", text, flags=re.M)
        assert count == 1, f"my_run.toml shows no {name}"
    (folder / "my_run.toml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        train.run(parse_args(["--config", "my_run.toml"]))
        patch.setattr(sys, "argv", ["convert_hf.py", "import", "--hf", "DIR", "--save", "MEGATRON_DIR"])
        convert_hf.main()
    shutil.copytree(folder / "runs/mine", folder / "runs/quickstart")
    return folder


def test_the_run_that_is_shown_trains_and_exports(folder):
    assert set(SHOWN) == {"prompts.jsonl", "my_reward.py", "my_run.toml"}
    lines = [json.loads(line) for line in (folder / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["reward/characters"] >= 0 for line in lines)
    assert sorted(path.name for path in (folder / "runs/mine/model").iterdir()) == sorted(
        path.name for path in (folder / "DIR").iterdir()
    )


# -- classes of commands -------------------------------------------------------------------------------------


class Typed:
    """What a command is tried with."""

    planned: set[tuple[str, ...]] = set()
    """Launches that were tried already: several pages show them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
        self.folder, self.monkeypatch, self.capfd = folder, monkeypatch, capfd

    def tool(self, main, argv: list[str], says: str) -> None:
        """Runs a tool's main."""
        assert main(argv) in (None, 0), self.capfd.readouterr().err
        assert re.search(says, self.capfd.readouterr().out)

    def convert(self, argv: list[str]) -> None:
        if "--save" in argv:
            shutil.rmtree(argv[argv.index("--save") + 1], ignore_errors=True)
        if argv[0] == "verify":
            argv = [*argv, "--tokens", "8"]
        self.monkeypatch.setattr(sys, "argv", ["convert_hf.py", *argv])
        self.tool(lambda _: convert_hf.main(), argv, '"roundtrip_bit_equal": true' if argv[0] == "verify" else "wrote ")

    def train(self, flags: list[str]) -> None:
        """A run from the beginning."""
        config = parse_args(flags)
        for written in (config.checkpoint.save, config.checkpoint.save_hf):
            shutil.rmtree(written, ignore_errors=True)
        train.run(config)
        assert "metrics    runs/" in self.capfd.readouterr().out

    def plan(self, flags: list[str], world_size: int) -> None:
        """Training flags, by the launch's own rules."""
        if "--dry-run" not in flags:
            flags = [*flags, "--dry-run", "--world-size", str(world_size)]
        assert "most at once" in launch.start("megatron_longstraw.train", flags, {})

    def torchrun(self, argv: list[str]) -> None:
        from torch.distributed.run import get_args_parser

        args = get_args_parser().parse_args(argv)
        world_size, flags = int(args.nnodes.rpartition(":")[2]) * int(args.nproc_per_node), args.training_script_args
        if args.training_script == "tools/check_gradients.py":
            check(check_gradients.parse(flags)[0], world_size)
            return
        if args.training_script == "tools/check_planner.py":
            check_planner.parse(flags)
            return
        if args.training_script == "tools/long_context_receipt.py":
            long_context_receipt.parse(flags, world_size)
            return
        assert (args.module, args.training_script) in (
            (True, "megatron_longstraw.train"),
            (False, "launch/pretrain_rl_longctx.sh"),
        )
        self.plan(flags, world_size)

    def bash(self, script: str, flags: list[str]) -> None:
        """A launch script prints its plan; of others the syntax is checked."""
        if not script.startswith("launch/"):
            assert not flags
            assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0
            return
        command = ("bash", script, *flags)
        if command not in self.planned:
            done = subprocess.run(command, cwd=self.folder, env=environment(DRY_RUN=1), capture_output=True, text=True)
            assert done.returncode == 0 and "\nmodel  " in done.stdout, done.stdout + done.stderr
            self.planned.add(command)

    def submit(self, argv: list[str]) -> None:
        self.tool(submit_slurm.main, ["--dry-run", *(word for word in argv if word != "--dry-run")], "^#!/bin/bash\n")

    def sbatch(self, argv: list[str]) -> None:
        options = leading_flags(argv, {"--nodes"})
        script, *flags = argv[len(options) :]
        assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0
        self.plan(flags, 8 * int(dict(option.split("=") for option in options).get("--nodes", 1)))

    def srun(self, argv: list[str]) -> None:
        options = leading_flags(argv, {"--ntasks-per-node"})
        assert "--ntasks-per-node=1" in options
        self.run(argv[len(options) :])

    def pip(self, argv: list[str]) -> None:
        assert argv[:1] == ["install"]
        constraints, target = argv[argv.index("-c") + 1], argv[argv.index("-e") + 1]
        assert len(argv) == 5 and (ROOT / constraints).exists()
        (extras,) = re.fullmatch(r"\.\[([\w,]+)\]", target).groups()
        declared = (ROOT / "setup.cfg").read_text().partition("[options.extras_require]")[2]
        assert all(re.search(rf"^{extra} =$", declared, re.M) for extra in extras.split(","))

    def run(self, words: list[str]) -> None:
        """Raises:
        AssertionError: the command is of no class, or would not do.
        """
        match words:
            case ["python", "-m", "megatron_longstraw.doctor"]:
                self.tool(lambda _: doctor.main(), [], "training can run")
            case ["python", "-m", "megatron_longstraw.planner", *flags]:
                self.tool(planner.main, flags, "fit|s a step")
            case ["python", "-m", "megatron_longstraw.train", *flags]:
                self.train(flags)
            case ["python", "tools/validate_data.py", *argv]:
                self.tool(validate_data.main, argv, "^accepted$|\naccepted\n")
            case ["python", "tools/report.py", *argv]:
                self.tool(report.main, argv, "report ")
            case ["python", "tools/config_reference.py", *argv]:
                self.tool(config_reference.main, argv, "")
            case ["python", "tools/submit_slurm.py", *argv]:
                self.submit(argv)
            case ["python", "tools/convert_hf.py", *argv]:
                self.convert(argv)
            case ["python", "tools/bench_step.py", *argv]:
                bench_step.parse(argv)
            case ["python", "tools/calibrate.py" | "tools/check_planner.py" | "tools/plan_table.py" as tool, *argv]:
                {"calibrate": calibrate, "check_planner": check_planner, "plan_table": plan_table}[Path(tool).stem].parse(argv)
            case ["python", "tools/fp8_error.py", *argv]:
                fp8_error.parse(argv)
            case ["python", "tools/scaling.py", *argv]:
                scaling.parse(argv)
            case ["torchrun", *argv]:
                self.torchrun(argv)
            case ["bash", script, *flags]:
                self.bash(script, flags)
            case ["sbatch", *argv]:
                self.sbatch(argv)
            case ["srun", *argv]:
                self.srun(argv)
            case ["pip", *argv]:
                self.pip(argv)
            case ["scancel", "--signal=USR1", "--batch", "JOB"]:
                pass  # tried on a cluster in test_slurm_cluster.py
            case ["tensorboard", "--logdir", run_dir] | ["wandb", "sync", run_dir]:
                run_dir = Path(run_dir)
                assert run_dir.is_dir() or run_dir.parent.name == "wandb"
            case _:
                raise AssertionError(f"a command of no class: {shlex.join(words)}")


def leading_flags(argv: list[str], known: set[str]) -> list[str]:
    """The words of the form --flag=value that a command line begins with, all of them known."""
    count = next(i for i, word in enumerate(argv) if not word.startswith("-"))
    assert {word.partition("=")[0] for word in argv[:count]} <= known
    return argv[:count]


@pytest.fixture
def typed(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return Typed(folder, monkeypatch, capfd)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.text[:60])
def test_command(command, typed):
    known = {"DRY_RUN", "OMP_NUM_THREADS", "CONTAINER_IMAGE", "CONTAINER_MOUNTS"}
    assert {name for name, _ in command.environ} <= known, "a variable that nothing reads"
    typed.run(list(command.words))


def test_blocks_are_read_as_bash_reads_them():
    text = "A=1 B='2 3' python x.py --flag 'a b' \\\n    last  # comment\n\n# only a comment\nbash y.sh\n"
    first, second = commands_of(text)
    assert first.environ == (("A", "1"), ("B", "2 3"))
    assert first.words == ("python", "x.py", "--flag", "a b", "last")
    assert second.words == ("bash", "y.sh")
    assert len(COMMANDS) > 25


@pytest.mark.parametrize(
    "line",
    [
        "python tools/new_tool.py",
        "python -m megatron_longstraw.train --config my_run.toml --no-such-flag 1",
        "torchrun --nproc-per-node 3 tools/check_gradients.py --context-parallel-size 2",
        "python tools/submit_slurm.py --nodes 2 --config my_run.toml --save runs/mine/save --time never",
        "bash launch/pretrain_rl_longctx.sh --config my_run.toml --group-size 0",
        "sbatch --nods=2 launch/slurm/pretrain_rl_longctx.sbatch --config my_run.toml",
        "python tools/validate_data.py prompts.jsonl --config my_run.toml --train-batch-size 5",
        "pip install -c constraints.txt -e '.[loging]'",
    ],
)
def test_a_command_that_would_not_do_is_found(line, typed):
    (command,) = commands_of(line)
    with pytest.raises((AssertionError, ValueError)):
        typed.run(list(command.words))
