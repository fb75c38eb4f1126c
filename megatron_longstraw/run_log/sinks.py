"""Where the metrics of a step go: JSON lines, TensorBoard, and Weights & Biases when asked for."""
from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path

import orjson

from megatron_longstraw.config import SECTIONS, Config, ConfigError, to_toml

STEP = "training/global_step"
WANDB_RUN = "wandb_run.json"
"""{project, id} of the run folder's run of Weights & Biases."""


class JsonLines:
    """metrics.jsonl: one object a step; null stands for a number that is not finite."""

    def __init__(self, path: Path, first_step: int):
        """Keeps the lines of steps before `first_step`, and begins anew where there are none."""
        kept = read_metrics(path)[0] if first_step and path.exists() else []
        _replace(path, b"".join(_line(row) for row in kept if row[STEP] < first_step))
        self.path = path

    def step(self, step: int, metrics: dict[str, float]) -> None:
        with self.path.open("ab") as file:  # an open file would take lines long after its folder is gone
            file.write(_line({STEP: step, **metrics}))

    def close(self) -> None:
        pass


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".partial")  # killed here, the old file is whole
    partial.write_bytes(data)
    partial.replace(path)


def _line(row: dict) -> bytes:
    return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def read_metrics(path: Path) -> tuple[list[dict], str | None]:
    """The rows of a metrics.jsonl, and what is wrong with its last line if that was cut off (a run in progress, or
    one that was killed): such a line is left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: another line is not a row of metrics.
    """
    lines, rows = path.read_bytes().split(b"\n"), []
    for number, line in enumerate(lines, start=1):
        if not line and number == len(lines):
            break
        try:
            row = orjson.loads(line)
            if not isinstance(row, dict) or STEP not in row:
                raise ValueError(f"no {STEP}")
            rows.append(row)
        except ValueError as error:
            if number == len(lines):
                return rows, f"line {number} is cut off after {len(line)} bytes and was left out"
            raise ValueError(f"{path}, line {number}: is not a row of metrics ({error})") from None
    return rows, None


class TensorBoard:
    """Event files; with --wandb-project or without."""

    def __init__(self, folder: Path, config: Config, first_step: int):
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to load; only the rank that writes needs it

        _wait_for_a_later_second(folder)
        # purge_step: what an earlier run left in the folder, from this step on, is not shown
        self._writer = SummaryWriter(str(folder), purge_step=first_step)
        self._writer.add_text("config", f"```toml\n{to_toml(config)}\n```", first_step)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _wait_for_a_later_second(folder: Path) -> None:
    """TensorBoard reads event files in the order of their names, which begin with the second they were made in: of two
    from one second the later one might be read first, and what it purges would come after."""
    made = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
    while made and time.time() < max(made) + 1:
        time.sleep(0.05)


class WandB:
    """A run of Weights & Biases (--wandb-project); `where` says where to see it. Prints nothing itself.

    Its id is kept in the run folder (`WANDB_RUN`). A run that goes on from a checkpoint goes on with that id, and a
    step that was logged before keeps its first values there.
    """

    def __init__(self, config: Config, first_step: int):
        """Raises:
        ConfigError: wandb cannot start the run.
        """
        wandb, logging = _wandb(), config.logging
        file = Path(config.run.run_dir) / WANDB_RUN
        known = orjson.loads(file.read_bytes()) if first_step and file.exists() else {}
        goes_on = known.get("project") == logging.wandb_project
        folder = Path(logging.wandb_save_dir or config.run.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            silent=True,
            console="off",  # it would copy the screen, bars and all
            save_code=False,
            disable_git=True,  # an address of a remote may hold a password
        )
        try:
            self._run = wandb.init(
                project=logging.wandb_project,
                name=logging.wandb_exp_name or Path(config.run.run_dir).name,
                id=known["id"] if goes_on else None,
                resume="allow" if goes_on else None,
                dir=str(folder),
                config={section: dataclasses.asdict(getattr(config, section)) for section in SECTIONS},
                settings=settings,
            )
        except wandb.Error as error:
            raise ConfigError([
                f"--wandb-project {logging.wandb_project}: wandb cannot start a run ({error}); "
                "WANDB_MODE=offline in the environment keeps it on this machine"
            ]) from None  # fmt: skip
        _replace(file, orjson.dumps({"project": logging.wandb_project, "id": self._run.id}))
        offline = self._run.offline
        self.where = f"wandb sync {Path(self._run.dir).parent}" if offline else self._run.url

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))


def check_sinks(config: Config) -> None:
    """Whether the metrics can go where they should, as far as the rank that writes them can know beforehand.

    Raises:
        ConfigError: wandb is wanted and is not installed, or has no key.
    """
    if config.logging.wandb_project is None or os.environ.get("RANK", "0") != "0":
        return
    wandb = _wandb()
    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
        raise ConfigError([
            f"--wandb-project {config.logging.wandb_project}: wandb has no API key; need `wandb login`, or WANDB_API_KEY "
            "or WANDB_MODE=offline in the environment"
        ])  # fmt: skip


def _wandb():
    try:
        import wandb
    except ImportError as error:
        raise ConfigError([
            f"--wandb-project needs the package wandb ({error}); pip install 'megatron_longstraw[wandb]'"
        ]) from None  # fmt: skip
    return wandb
