"""What a run leaves behind: config.toml, metrics.jsonl, the reward curve, and lines on the screen (rank 0)."""
from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import torch

from megatron_longstraw.config import Config, to_toml

BAR_WIDTH = 20


class RunLog:
    """Writes the files of one run folder; silent on every rank but one.

    Args:
        steps_done: a run that goes on keeps its lines of so many steps; later ones are cut off.

    Raises:
        OSError: the folder cannot be made or written, before training starts.
    """

    def __init__(self, config: Config, active: bool, steps_done: int = 0):
        self.folder = Path(config.run.run_dir)
        self.active = active
        self.rewards: list[float] = []
        self._num_steps = config.run.train_iters
        if active:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.toml").write_text(to_toml(config))
            path = self.folder / "metrics.jsonl"
            earlier = path.read_text().splitlines(keepends=True)[:steps_done] if steps_done and path.exists() else []
            self.rewards = [json.loads(line)["critic/score/mean"] for line in earlier]
            self.metrics_file = path.open("w")
            self.metrics_file.writelines(earlier)

    def say(self, text: str = "") -> None:
        if self.active:
            print(text, flush=True)

    def step(self, step: int, metrics: dict[str, float], notes: list[str]) -> None:
        """One JSON line in metrics.jsonl and one line with a progress bar on the screen."""
        if not self.active:
            return
        self.rewards.append(metrics["critic/score/mean"])
        self.metrics_file.write(json.dumps({"training/global_step": step, **metrics}) + "\n")
        self.metrics_file.flush()
        shown = [
            f"reward {metrics['critic/score/mean']:.3f}",
            f"pg_loss {metrics.get('actor/pg_loss', 0.0):+.4f}",
            f"grad_norm {metrics.get('actor/grad_norm', 0.0):.3f}",
            f"entropy {metrics.get('actor/entropy', 0.0):.3f}",
            f"{metrics['timing_s/step']:.2f} s",
            *notes,
        ]
        self.say(f"{progress(step + 1, self._num_steps)}  " + "  ".join(shown))

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
        figure.savefig(self.folder / "reward.png")
        pyplot.close(figure)
        return self.folder / "reward.png"

    def close(self) -> None:
        if self.active:
            self.metrics_file.close()


def progress(done: int, total: int) -> str:
    filled = BAR_WIDTH * done // total
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {done:>{len(str(total))}}/{total}"


def moving_average(values: list[float], width: int) -> tuple[list[int], list[float]]:
    """(step numbers, mean of the last `width` values up to each step)."""
    steps = list(range(min(width, len(values)), len(values) + 1))
    return steps, [sum(values[max(0, end - width) : end]) / min(width, end) for end in steps]


def peak_memory_bytes() -> int:
    """Largest memory of this process so far: allocated on the GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
