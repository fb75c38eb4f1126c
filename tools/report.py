"""One HTML page about a run, for a browser without a network: curves, final numbers, configuration, versions.

    python tools/report.py RUN                  # writes RUN/report.html
    python tools/report.py RUN --out page.html

RUN is the folder of a run (--run-dir), finished or not.
"""
from __future__ import annotations

import argparse
import json
import math
import sys
import tomllib
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_longstraw.config import SETTINGS
from megatron_longstraw.run_log import read_metrics

LAST_STEPS = 10
CSS = """
:root { color: #20262b; background: #f4f6f8; font: 15px/1.45 system-ui, "DejaVu Sans", sans-serif; }
body { max-width: 1240px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 32px 0 10px; }
p { margin: 4px 0; color: #4a5157; }
.warning { color: #8a4b00; background: #fff3dc; border-radius: 6px; padding: 6px 10px; }
.grid { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
.tiles { grid-template-columns: repeat(auto-fit, minmax(min(100%, 170px), 1fr)); margin: 16px 0; }
.card { background: #fff; border: 1px solid #dfe3e7; border-radius: 8px; padding: 12px 14px; margin: 0; min-width: 0; }
.tiles .card b { display: block; font-size: 1.35rem; }
.card span, .legend, td:first-child, th { color: #5b636a; }
.card h3 { font-size: 0.95rem; margin: 0 0 6px; }
.card h3 span { font-weight: normal; font-size: 0.85rem; margin-left: 4px; }
svg { display: block; width: 100%; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 0.8rem; margin-top: 6px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
table { border-collapse: collapse; width: 100%; font-size: 0.85rem; }
th, td { text-align: right; font-weight: normal; padding: 2px 0 2px 10px; vertical-align: top; }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; padding-left: 0; }
.numbers td + td { width: 6em; }
.columns { columns: 3 320px; column-gap: 14px; }
.columns .card { break-inside: avoid; margin-bottom: 14px; }
.all { grid-column: 1 / -1; }
@media (min-width: 760px) { .wide { grid-column: span 2; } }
pre { overflow-x: auto; font-size: 0.8rem; margin: 8px 0 0; }
summary { cursor: pointer; }
"""


def page(folder: Path) -> str:
    """The report of a run folder.

    Raises:
        OSError, ValueError: there are no metrics, or they cannot be read.
    """
    rows, problem = read_metrics(folder / "metrics.jsonl")
    if not rows:
        raise ValueError(f"{folder / 'metrics.jsonl'}: holds no finished step yet")
    config_text = _read(folder / "config.toml")
    environment = json.loads(_read(folder / "environment.json") or "{}")
    config = tomllib.loads(config_text or "")
    warning = f'<p class="warning">metrics.jsonl: {escape(problem)}</p>' if problem else ""
    body = [
        f"<h1>{escape(folder.resolve().name)}</h1>{warning}",
        _tiles(rows, config),
        "<h2>Curves</h2>",
        _charts(rows),
        f"<h2>Final numbers</h2><p>Last step, and mean of the last {min(LAST_STEPS, len(rows))} steps.</p>",
        _numbers(rows),
        "<h2>Configuration and versions</h2>",
        _configuration(config, config_text, environment),
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(folder.resolve().name)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<style>{CSS}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _tiles(rows: list[dict], config: dict) -> str:
    once, dense = (sum(row.get(f"prefix/tokens_{name}", 0.0) for row in rows) for name in ("once", "dense"))
    seconds = sum(row.get("timing_s/step", 0.0) for row in rows)
    window = min(LAST_STEPS, -(-len(rows) // 2))
    first, last = (mean_of(part, "critic/score/mean") for part in (rows[:window], rows[-window:]))
    planned = config.get("run", {}).get("train_iters")
    done = int(rows[-1]["training/global_step"]) + 1
    tiles = [
        ("Reward", number(last), f"last {window} steps; first {window}: {number(first)}"),
        ("Steps", f"{done:,}", f"of {planned:,}" if planned else ""),
        ("Time", duration(seconds), f"{number(seconds / len(rows))} s a step"),
        (
            "Prompt tokens saved",
            f"{1 - once / dense:.1%}" if dense else "-",
            f"{once:,.0f} run; {dense:,.0f} in whole sequences",
        ),
        ("Peak memory", f"{number(rows[-1].get('perf/max_memory_allocated_gb'))} GiB", "largest over the ranks"),
    ]
    cards = (f'<div class="card"><span>{name}</span><b>{big}</b><span>{small}</span></div>' for name, big, small in tiles)
    return f'<div class="grid tiles">{"".join(cards)}</div>'


def _charts(rows: list[dict]) -> str:
    import report_charts

    drawn = [(chart.title, chart.unit, *report_charts.draw(chart, rows)) for chart in report_charts.CHARTS]
    drawn.insert(5, ("Time", "seconds a step, by call", *report_charts.draw_seconds(rows)))
    cards = []
    for title, unit, svg, legend in drawn:
        swatches = "".join(f'<div><i style="background:{color}"></i>{label}</div>' for label, color in legend)
        cards.append(
            f'<figure class="card"><h3>{title}<span>{unit}</span></h3>{svg or "<p>not logged in this run</p>"}'
            f'<div class="legend">{swatches}</div></figure>'
        )
    return f'<div class="grid">{"".join(cards)}</div>'


def _numbers(rows: list[dict]) -> str:
    """Every metric of the run, by the part of its name before the first slash."""
    names = sorted({name for row in rows for name in row} - {"training/global_step"})
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("/")[0] if "/" in name else "other", []).append(name)
    cards = []
    for group, members in groups.items():
        lines = []
        for name in members:
            shown = number(rows[-1].get(name)), number(mean_of(rows[-LAST_STEPS:], name))
            lines.append((name.removeprefix(f"{group}/"), *shown))
        cards.append(f'<div class="card"><h3>{escape(group)}</h3>{table(lines, ("", "last", "mean"))}</div>')
    return f'<div class="numbers columns">{"".join(cards)}</div>'


def mean_of(rows: list[dict], name: str) -> float | None:
    """Over the rows that have a finite value."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def _configuration(config: dict, text: str | None, environment: dict) -> str:
    changed = [
        (f"{section}.{name}", json.dumps(value))
        for section, values in config.items()
        for name, value in values.items()
        if name not in SETTINGS or SETTINGS[name].from_value(value) != SETTINGS[name].default
    ]
    versions = [(name, str(value)) for name, value in environment.items()] or [("environment.json", "not in the folder")]
    whole = f"<details><summary>The whole configuration</summary><pre>{escape(text or 'no config.toml in the folder')}</pre></details>"
    return (
        f'<div class="grid"><div class="card"><h3>Versions</h3>{table(versions)}</div>'
        f'<div class="card wide"><h3>Options other than the defaults</h3>{table(changed)}</div>'
        f'<div class="card all">{whole}</div></div>'
    )


def table(rows: list[tuple[str, ...]], head: tuple[str, ...] = ()) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"] if head else []
    lines += [
        "<tr>" + "".join(f"<td>{escape(cell).replace('_', '_<wbr>')}</td>" for cell in row) + "</tr>" for row in rows
    ]
    return f"<table>{''.join(lines)}</table>"


def number(value: float | None) -> str:
    """Four significant digits, thousands apart; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.3g}"
    digits = 0 if not value or float(value).is_integer() else max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--out", type=Path, help="file to write (default: report.html in the folder)")
    args = parser.parse_args(argv)
    out = args.out or args.run / "report.html"
    try:
        out.write_text(page(args.run))
    except ModuleNotFoundError as error:
        print(f"the report needs {error.name}: pip install 'megatron_longstraw[logging]'", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"report     {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
