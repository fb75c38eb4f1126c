"""The charts of a run's report: inline SVG, drawn by matplotlib, sized to be read in a column of 340 to 420 pixels."""
from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import EngFormatter, MaxNLocator

Rows = list[dict]
STEP = "training/global_step"
MAX_POINTS = 300
"""Longer runs are drawn as means over equally many steps, or the page would grow with the run."""
SMOOTH_STEPS = 10
MARKED_POINTS = 40
"""Up to so many steps each has its dot or its bar."""
CALLS = {
    "capture": "#1f4e79",
    "rollout": "#e69f00",
    "score": "#8c6bb1",
    "reward": "#d55e5e",
    "replay": "#009e73",
    "prefix_backward": "#56a3d9",
    "full": "#4d9a9a",
    "optimizer": "#a6761d",
}
REST = ("rest of the step", "#c8ccd0")
DARK, LIGHT, ACCENT = "#1f4e79", "#9db7d5", "#e69f00"
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a9199",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6e9",
    "xtick.color": "#4a5157",
    "ytick.color": "#4a5157",
    "axes.labelcolor": "#4a5157",
}


@dataclass(frozen=True)
class Line:
    metric: str
    label: str
    color: str = DARK
    scale: float = 1.0
    smooth: bool = False


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    lines: tuple[Line, ...]
    from_zero: bool = True


CHARTS = (
    Chart(
        "Reward",
        "mean score of a step's responses",
        (
            Line("critic/score/mean", "step", LIGHT),
            Line("critic/score/mean", f"mean of {SMOOTH_STEPS} steps", smooth=True),
        ),
        from_zero=False,
    ),
    Chart(
        "Response length",
        "tokens",
        (Line("response_length/max", "longest", LIGHT), Line("response_length/mean", "mean")),
    ),
    Chart(
        "KL",
        "nats a token, old policy to new",
        (Line("actor/ppo_kl", "actor/ppo_kl"),),
        from_zero=False,
    ),
    Chart("Entropy", "nats a token", (Line("actor/entropy", "actor/entropy"),)),
    Chart("Gradient norm", "before clipping", (Line("actor/grad_norm", "actor/grad_norm"),)),
    Chart("Throughput", "tokens a second and rank", (Line("perf/throughput", "perf/throughput"),)),
    Chart(
        "Memory",
        "GiB, on the rank that needs most",
        (
            Line("perf/max_memory_allocated_gb", "largest so far"),
            Line("prefix/state_bytes", "prefix states", ACCENT, scale=2**-30),
        ),
    ),
    Chart(
        "Prompt tokens",
        "a step",
        (Line("prefix/tokens_dense", "whole sequences", LIGHT), Line("prefix/tokens_once", "run")),
    ),
)


def draw(chart: Chart, rows: Rows) -> tuple[str, list[tuple[str, str]]]:
    """(SVG, legend as (label, color)); an empty SVG when no step has the metric."""
    lines = [(line, column(rows, line.metric, line.scale)) for line in chart.lines]
    lines = [(line, values) for line, values in lines if any(map(math.isfinite, values))]
    if not lines:
        return "", []
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": chart.title}):
        steps = binned(column(rows, STEP))
        figure, axes = _axes(steps)
        for line, values in lines:
            points = binned(smoothed(values) if line.smooth else values)
            # between steps without a value a line would not be seen
            dots = not line.smooth and (len(points) <= MARKED_POINTS or any(map(math.isnan, points)))
            axes.plot(steps, points, color=line.color, linewidth=1.6, marker="." if dots else None, markersize=4)
        if chart.from_zero and axes.get_ylim()[0] > 0:
            axes.set_ylim(0, 1.05 * axes.dataLim.ymax)
        legend = [(line.label, line.color) for line, _ in lines] if len(lines) > 1 else []
        return _svg(figure), legend


def draw_seconds(rows: Rows) -> tuple[str, list[tuple[str, str]]]:
    """Seconds of a step by call, stacked; what no call accounts for is the rest."""
    calls = [name for name in CALLS if any(f"timing_s/{name}" in row for row in rows)]
    layers = [[row.get(f"timing_s/{name}", 0.0) for row in rows] for name in calls]
    whole = column(rows, "timing_s/step")
    layers.append([max(step - sum(parts), 0.0) for step, parts in zip(whole, zip(*layers))] if calls else whole)
    names = [*((name, CALLS[name]) for name in calls), REST]
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "seconds"}):
        steps = binned(column(rows, STEP))
        figure, axes = _axes(steps)
        bottom = [0.0] * len(steps)
        for values, (_, color) in zip(map(binned, layers), names):
            if len(steps) <= MARKED_POINTS:
                axes.bar(steps, values, bottom=bottom, color=color, linewidth=0)
            else:
                axes.fill_between(steps, bottom, [a + b for a, b in zip(bottom, values)], color=color, linewidth=0)
            bottom = [a + b for a, b in zip(bottom, values)]
        axes.set_ylim(bottom=0)
        return _svg(figure), names


def column(rows: Rows, metric: str, scale: float = 1.0) -> list[float]:
    """The metric of every row; NaN where it is missing or was not finite."""
    values = (row.get(metric) for row in rows)
    return [math.nan if value is None else value * scale for value in values]


def smoothed(values: list[float]) -> list[float]:
    """Mean of the last SMOOTH_STEPS values up to each, as far as there are any."""
    return [mean(values[max(0, end - SMOOTH_STEPS) : end]) for end in range(1, len(values) + 1)]


def binned(values: list[float]) -> list[float]:
    """At most MAX_POINTS values: means over equally many."""
    size = math.ceil(len(values) / MAX_POINTS)
    return [mean(values[begin : begin + size]) for begin in range(0, len(values), size)]


def mean(values: list[float]) -> float:
    """Over the finite ones; NaN over none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _axes(steps: list[float]):
    figure, axes = pyplot.subplots(figsize=(4.2, 2.4), layout="constrained")
    margin = max(0.6, 0.04 * (steps[-1] - steps[0]))
    axes.set_xlim(steps[0] - margin, steps[-1] + margin)
    axes.set_xlabel(STEP)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(tick)
    return figure, axes


def tick(value: float, _=None) -> str:
    return EngFormatter(sep="").format_data(value) if abs(value) >= 1e4 else f"{value:,.6g}"


def _svg(figure) -> str:
    """The figure as an <svg> that may stand in a page beside others: nothing before it, and no ids but those used."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    pyplot.close(figure)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    used = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", svg)
    return re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
