"""The report of a real run, as a browser shows it on a desk and on a phone."""
from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import report
from megatron_longstraw import PromptGroup, load_config, train
from megatron_longstraw.run_log import read_metrics
from tests.helpers import TINY

TOOL = Path(report.__file__)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
STEPS = 6
FIGURES = [
    "Reward", "Response length", "KL", "Entropy", "Gradient norm", "Time", "Throughput", "Memory", "Prompt tokens",
]  # fmt: skip
WIDTHS = {"desk": 1200, "phone": 390}
PROBE = """<iframe width="{width}" height="6000" style="border: 0" srcdoc="{page}"></iframe>
<pre id="probe"></pre>
<script>
addEventListener("load", () => {{
  const page = document.querySelector("iframe").contentDocument;
  const box = (element) => {{ const r = element.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; }};
  const figures = [...page.querySelectorAll("figure")].map((figure) => ({{
    name: figure.querySelector("h3").firstChild.data,
    chart: box(figure.querySelector("svg")),
    texts: [...figure.querySelectorAll("text, h3, .legend > div")].map((text) => [text.textContent, box(text)]),
  }}));
  const ids = [...page.querySelectorAll("[id]")].map((element) => element.id);
  const facts = {{ figures, ids, width: page.defaultView.innerWidth, scrolls: page.documentElement.scrollWidth }};
  document.getElementById("probe").textContent = JSON.stringify(facts);
}});
</script>"""
"""Says where things are on the page, in a frame because a window is at least 500 pixels wide."""


class Prompts:
    def prompts(self, step, num_prompts):
        rng = np.random.default_rng(step)
        return [PromptGroup(rng.integers(0, 60, 100), group_id=f"{step}-{i}") for i in range(num_prompts)]

    def render(self, ids):
        return " ".join(map(str, ids))


def task(config):
    return Prompts()


def reward(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(len(solution_str) % 3), "<b>bold</b>": 1.0}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "a & b"
    options = {"prompt_function": f"{__name__}:task", "reward_function": f"{__name__}:reward", "run_dir": str(folder)}
    train.run(load_config(overrides=TINY | options | {"train_iters": STEPS, "ppo_epochs": 2}))
    return folder


@pytest.fixture(scope="module")
def page(run_folder):
    assert report.main([str(run_folder)]) == 0
    return run_folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Runs Chromium without a window: (standard output, what the page's console said)."""
    if CHROMIUM is None:
        assert os.environ.get("CI") != "true", "no chromium on this machine (Debian: apt-get install chromium)"
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    profile = tmp_path_factory.mktemp("profile")

    def browse(path: Path, width: int, height: int, *flags: str) -> tuple[str, list[str]]:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
        command += [f"--user-data-dir={profile}", f"--window-size={width},{height}", *flags, path.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return browse


@pytest.fixture(scope="module", params=WIDTHS)
def seen(request, page, browser, tmp_path_factory):
    """(where things are, screenshot, console) at one width."""
    folder, width = tmp_path_factory.mktemp(request.param), WIDTHS[request.param]
    probe = folder / "probe.html"
    probe.write_text(PROBE.format(width=width, page=html.escape(page.read_text())))
    dom, _ = browser(probe, 1300, 900, "--dump-dom")
    facts = json.loads(html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', dom, re.S)[1]))
    assert facts["width"] == width
    _, console = browser(page, width, 6000, f"--screenshot={folder / 'page.png'}")
    return facts, np.asarray(Image.open(folder / "page.png").convert("RGB")), console


def test_every_chart_is_drawn(seen):
    facts, picture, console = seen
    assert console == []
    assert [figure["name"] for figure in facts["figures"]] == FIGURES
    for figure in facts["figures"]:
        left, top, right, bottom = map(int, figure["chart"])
        assert right - left >= 280 and bottom - top >= 150, figure["name"]
        chart = picture[top:bottom, left:right].reshape(-1, 3).astype(int)
        colored = np.ptp(chart, axis=1) > 40  # lines and bars have a colour; axes, grid and words are grey
        assert 0.001 < colored.mean() < 0.6, f"{figure['name']}: {colored.mean():.4f} of its area is drawn on"


def test_nothing_overlaps_or_sticks_out(seen):
    facts, *_ = seen
    assert facts["scrolls"] <= facts["width"]
    for figure in facts["figures"]:
        texts = figure["texts"]
        assert len(texts) > 6, figure["name"]
        for i, (text, (left, top, right, bottom)) in enumerate(texts):
            assert 0 <= left < right <= facts["width"], text
            for other, (left2, top2, right2, bottom2) in texts[i + 1 :]:
                apart = right <= left2 or right2 <= left or bottom <= top2 + 1 or bottom2 <= top + 1
                assert apart, f"{figure['name']}: {text!r} and {other!r}"
    assert len(facts["ids"]) == len(set(facts["ids"])) > 0


def test_what_a_browser_reads_in_it(page, run_folder, browser):
    dom, _ = browser(page, 1200, 900, "--dump-dom")
    text = html.unescape(re.sub(r"<[^>]+>", " ", dom.partition("<body>")[2]))
    text = re.sub(r"\s+", " ", text)
    rows, _ = read_metrics(run_folder / "metrics.jsonl")
    once, dense = (int(sum(row[f"prefix/tokens_{name}"] for row in rows)) for name in ("once", "dense"))
    environment = json.loads((run_folder / "environment.json").read_text())
    for words in (
        "a & b",
        f"Steps {STEPS} of {STEPS}",
        f"Prompt tokens saved {1 - once / dense:.1%} {once:,} run; {dense:,} in whole sequences",
        f"torch {environment['torch']}",
        f"python {environment['python']}",
        f"megatron-core {environment['megatron-core']}",
        "megatron_ longstraw 0.1",
        "algorithm.ppo_ epochs 2",
        "mean of 10 steps",
        "prefix_backward",
        "<b>bold</b> 1 1",
        f"score/mean {report.number(rows[-1]['critic/score/mean'])}",
    ):
        assert words in text, words
    assert "prefix_chunk_tokens = 32" in dom, "the whole configuration"


def test_the_page_needs_nothing_from_elsewhere(page):
    text = page.read_text()
    assert "<script" not in text and "@import" not in text and "<link" in text
    addresses = re.findall(r'(?:src|href|action)\s*=\s*"([^"]*)"', text) + re.findall(r"url\(([^)]*)\)", text)
    assert all(address.startswith(("#", "data:")) for address in addresses), addresses
    assert len(text) < 300_000


def test_a_run_in_progress_and_an_old_one(run_folder, tmp_path):
    """The last line half written, updates skipped, no configuration, no versions."""
    lines = (run_folder / "metrics.jsonl").read_bytes().splitlines()[:3]
    skipped = {name: value for name, value in json.loads(lines[1]).items() if not name.startswith("actor/")}
    skipped["critic/score/mean"] = None
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([lines[0], json.dumps(skipped).encode(), lines[2][:50]]))
    text = report.page(tmp_path)
    assert "metrics.jsonl: line 3 is cut off after 50 bytes and was left out" in text
    assert "no config.toml in the folder" in text and "not in the folder" in text
    assert text.count("<svg") == len(FIGURES)


def test_a_long_run_is_drawn_small(tmp_path):
    rng = np.random.default_rng(0)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(5000):
            row = {"training/global_step": step, "critic/score/mean": rng.random(), "timing_s/step": 1.0}
            print(json.dumps(row | {"timing_s/capture": 0.5}), file=file)
    text = report.page(tmp_path)
    assert text.count("<svg") == 2 and text.count("not logged in this run") == len(FIGURES) - 2
    assert len(text) < 150_000


BAD = [
    ({}, "metrics.jsonl"),
    ({"metrics.jsonl": ""}, "holds no finished step yet"),
    ({"metrics.jsonl": "{}\n{}\n"}, "line 1: is not a row of metrics"),
]


@pytest.mark.parametrize(("files", "words"), BAD, ids=[words for _, words in BAD])
def test_without_metrics_it_is_one_line(files, words, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, TOOL, tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "report.html").exists()
