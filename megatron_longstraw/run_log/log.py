"""The run folder and the screen, from the one rank that writes."""
from __future__ import annotations

import json
import sys
from collections import deque
from pathlib import Path

from tqdm import tqdm

from megatron_longstraw.config import Config, ConfigError, to_toml
from megatron_longstraw.disk import writing
from megatron_longstraw.run_log.environment import environment
from megatron_longstraw.run_log.progress import ProgressDisplay
from megatron_longstraw.run_log.sinks import JsonLines, TensorBoard, WandB, read_metrics

BAR_WIDTH = 20
STEPS_OF_ETA = 10
"""The time left is that of so many last steps, times the steps left."""


class RunLog:
    """Writes the files of one run folder; silent on every rank but one.

    Args:
        first_step: what the folder holds of this step and later ones is dropped, earlier metrics are kept (a resumed
            run).

    Raises:
        ConfigError: the folder cannot be written, or Weights & Biases cannot start, before training starts.
    """

    def __init__(self, config: Config, active: bool, first_step: int = 0):
        self.folder = Path(config.run.run_dir)
        self.active = active
        self.rewards: list[float] = []
        self.progress: ProgressDisplay | None = None
        """For `Meter.watcher`; None on ranks that show nothing."""
        self._num_steps = config.run.train_iters
        self._step_s: deque[float] = deque(maxlen=STEPS_OF_ETA)
        self._sinks: list[JsonLines | TensorBoard | WandB] = []
        if active:
            self._open(config, first_step)

    def _open(self, config: Config, first_step: int) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.toml").write_text(to_toml(config))
            (self.folder / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")
            metrics_file = self.folder / "metrics.jsonl"
            self._sinks.append(JsonLines(metrics_file, first_step))
            self.rewards = [row["critic/score/mean"] for row in read_metrics(metrics_file)[0]]
            self._sinks.append(TensorBoard(self.folder / "tensorboard", config, first_step))
        except OSError as error:
            raise ConfigError([
                f"run_dir: got {self.folder}, need a folder that can be written ({error}); change --run-dir"
            ]) from None  # fmt: skip
        self.progress = ProgressDisplay(self.say, config.logging.progress_interval_s, sys.stderr)
        self.progress.quiet(self._title(first_step))
        if config.logging.wandb_project is not None:
            wandb = WandB(config, first_step)
            self._sinks.append(wandb)
            self.say(f"wandb      {wandb.where}")

    def say(self, text: str = "") -> None:
        if self.active:
            with tqdm.external_write_mode(file=sys.stdout):  # a bar on the terminal makes room
                print(text, flush=True)

    def step(self, step: int, metrics: dict[str, float], notes: list[str]) -> None:
        """The metrics to every sink, and one line with a progress bar on the screen.

        Raises:
            DiskError: the folder cannot be written any more.
        """
        if not self.active:
            return
        self.rewards.append(metrics["critic/score/mean"])
        with writing(self.folder, "--run-dir"):
            for sink in self._sinks:
                sink.step(step, metrics)
        self._step_s.append(metrics["timing_s/step"])
        shown = [
            f"reward {metrics['critic/score/mean']:.3f}",
            f"pg_loss {metrics.get('actor/pg_loss', 0.0):+.4f}",
            f"grad_norm {metrics.get('actor/grad_norm', 0.0):.3f}",
            f"entropy {metrics.get('actor/entropy', 0.0):.3f}",
            f"{metrics['timing_s/step']:.2f} s",
            f"{metrics['perf/total_num_tokens'] / metrics['timing_s/step']:,.0f} tokens/s",
            *notes,
        ]
        steps_left = self._num_steps - step - 1
        if steps_left:
            shown.append(f"{tqdm.format_interval(steps_left * sum(self._step_s) / len(self._step_s))} left")
        self.say(f"{progress(step + 1, self._num_steps)}  " + "  ".join(shown))
        self.progress.quiet(self._title(step + 1))

    def _title(self, step: int) -> str:
        return f"step {step + 1}/{self._num_steps}"

    def plot_rewards(self) -> Path | None:
        """reward.png, when matplotlib is installed (extra `logging`)."""
        if not self.active or not self.rewards:
            return None
        try:
            import matplotlib
        except ImportError:
            return None
        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
        axes.plot(range(1, len(self.rewards) + 1), self.rewards, color="#9db7d5", linewidth=1, label="step")
        axes.plot(*moving_average(self.rewards, 10), color="#1f4e79", linewidth=2, label="mean of 10 steps")
        axes.set(xlabel="RL step", ylabel="mean reward", ylim=(0, 1.02), title="Reward of the sampled responses")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        figure.tight_layout()
        with writing(self.folder, "--run-dir"):
            figure.savefig(self.folder / "reward.png")
        pyplot.close(figure)
        return self.folder / "reward.png"

    def close(self) -> None:
        if self.progress is not None:
            self.progress.close()
        with writing(self.folder, "--run-dir"):
            for sink in self._sinks:
                sink.close()


def progress(done: int, total: int) -> str:
    filled = BAR_WIDTH * done // total
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {done:>{len(str(total))}}/{total}"


def moving_average(values: list[float], width: int) -> tuple[list[int], list[float]]:
    """(step numbers, mean of the last `width` values up to each step)."""
    steps = list(range(min(width, len(values)), len(values) + 1))
    return steps, [sum(values[max(0, end - width) : end]) / min(width, end) for end in steps]
