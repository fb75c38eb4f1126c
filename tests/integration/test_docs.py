"""The documentation: its code runs, what it names and links to exists, and what it quotes is what the package says."""
import ast
import functools
import json
import re
import subprocess
import sys

import config_reference
import pytest

from megatron_longstraw.config import SETTINGS
from tests.doc_pages import PAGES, ROOT, blocks, code_spans, prose

README, TROUBLES, METRICS = ROOT / "README.md", ROOT / "docs/troubleshooting.md", ROOT / "docs/metrics.md"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_python_example_runs_and_is_short():
    (code,) = blocks(README, "python")
    assert len(code.splitlines()) <= 25
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    logprobs = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(logprobs) == 3 and logprobs[-1] > logprobs[0], "the rewarded response became likelier"


@each_page
def test_files_that_it_names_exist(page):
    text = page.read_text()
    starters = r"(?:bash|python|(?:torchrun|sbatch) [^`\n]*?)"
    named = re.findall(rf"{starters} ((?:launch|tests|tools|examples)/\S+\.(?:sh|py|sbatch))", text)
    named += re.findall(r"launch/\w+/\S+\.toml", text)
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "runs")
    named += [span for span in code_spans(page) if re.fullmatch(rf"({folders})/[\w./-]*", span)]
    for path in named:
        assert (ROOT / path).exists(), path


FOREIGN = {
    "pip": {"--no-build-isolation"},
    "torchrun": {"--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint"},
    "slurm": {"--ntasks-per-node", "--nodes", "--signal", "--batch", "--gpus-per-node", "--time", "--partition"},
    "others": {"--help", "--config", "--json", "--slow", "--logdir"},
    "launch": {"--dry-run", "--world-size", "--master-addr", "--master-port"},
    "tools": {"--response-tokens", "--prompt-tokens", "--schedules", "--repeats", "--group-size", "--hf", "--hf-origin"}
    | {"--tokenizer", "--write", "--check", "--signal-minutes", "--container-image", "--container-mounts"}
    | {"--hardware", "--rates", "--solve", "--model", "--adapter-rank", "--adapter-scope"}
    | {"--text", "--response-lengths", "--shares-only", "--positions", "--state", "--plots"},
}
"""Flags of other programs, by whose they are. Those of commands are held against their parsers in test_doc_commands.py."""


@each_page
def test_flags_that_it_names_exist(page):
    known = {flag for setting in SETTINGS.values() for flag in setting.flags}
    known |= {setting.flag.replace("--", "--no-", 1) for setting in SETTINGS.values() if setting.type is bool}
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", page.read_text()))
    assert not named - known - set().union(*FOREIGN.values())


@each_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def anchors(page):
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_reached_from_the_readme():
    assert {page.name for page in PAGES[1:]} == set(re.findall(r"\(docs/([\w.]+)[)#]", README.read_text()))


def test_the_configuration_reference_is_what_the_options_say():
    assert config_reference.main(["--check"]) == 0, "run python tools/config_reference.py --write"


def test_a_stale_configuration_reference_is_found_and_written_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(config_reference, "FILE", tmp_path / "configuration.md")
    assert config_reference.main(["--check"]) == 1
    config_reference.FILE.write_text(config_reference.reference().replace("`1e-06`", "`1e-05`"))
    assert config_reference.main(["--check"]) == 1 and "config_reference.py --write" in capsys.readouterr().err
    assert config_reference.main(["--write"]) == config_reference.main(["--check"]) == 0
    assert config_reference.FILE.read_text() == config_reference.reference()


def test_the_configuration_reference_says_everything_about_an_option():
    rows = {row.split("`")[1]: row for row in config_reference.reference().splitlines() if row.startswith("| `--")}
    assert list(rows) == [setting.flag for setting in SETTINGS.values()]
    for words in (
        "| `--group-size` (also `--n`, `--n-samples-per-prompt`) | integer | `>= 1` | `8` | responses per prompt ",
        "| `--clip-ratio-low` | number | `> 0`, `< 1`, `none` | unset | ",
        '| `--prefix-grad` | text | exact, frozen or last:N with N >= 1 | `"exact"` | ',
        "| `--prefix-out-tier` | text | `none`, `device`, `host` | unset | ",
        "| `--prefix-state-budget` | bytes | `>= 0`, `none` | unset | ",
        "| `--train-files` (also `--prompt-data`) | list of texts |  | `[]` | ",
        "| `--bf16` | boolean |  | `false` | ",
    ):
        assert any(row.startswith(words) for row in rows.values()), words


def test_metrics_that_a_page_names_are_defined():
    defined = set(re.findall(r"`([^`]+)`", METRICS.read_text().partition("| metric | what |")[2].partition("\n\n")[0]))
    families = {name.partition("/")[0] for name in defined if "/" in name}
    for page in PAGES:
        for span in code_spans(page):
            family, slash, rest = span.partition("/")
            if slash and rest and family in families and " " not in span:
                assert span in defined, f"{page.name}: {span}"


# -- messages ------------------------------------------------------------------------------------------------

JOINTS = r"\.\.\.|, need |; change |^got "
"""Where a message is put together: what varies, and the frame that config/settings.py and config/rules.py give it."""
SHORTEST = 9
"""Characters of a line's longest fixed part; with less it would say nothing."""


@functools.cache
def said():
    """Every literal of the sources and the fixed parts of their f-strings, docstrings left out; scripts as a whole."""
    texts = [path.read_text() for path in sorted(ROOT.glob("launch/**/*.*sh")) + sorted(ROOT.glob("launch/**/*.sbatch"))]
    for path in sorted([*ROOT.glob("megatron_longstraw/**/*.py"), *ROOT.glob("tools/*.py")]):
        tree = ast.parse(path.read_text())
        bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        literals = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in bare)
        texts += [node.value for node in literals if isinstance(node.value, str)]
    return texts


@functools.cache
def error_names():
    paths = [*ROOT.glob("megatron_longstraw/**/*.py"), *ROOT.glob("tools/*.py")]
    return {name for path in paths for name in re.findall(r"^class (\w+Error)\b", path.read_text(), re.M)}


def fixed_parts(line):
    """The parts of a quoted message that do not vary, without the name of its error."""
    name, colon, rest = line.partition(": ")
    if colon and re.fullmatch(r"\w+Error", name):
        assert name in error_names(), line
        line = rest
    return [part.strip() for part in re.split(JOINTS, line) if re.search(r"\w", part)]


def unsaid(line):
    """Parts of a quoted message that no source can print; all of it where it quotes next to nothing."""
    parts = fixed_parts(line)
    if max(map(len, parts), default=0) < SHORTEST:
        return [line]
    return [part for part in parts if not any(part in text for text in said())]


def test_quoted_messages_are_those_of_the_sources():
    quoted = [line for block in blocks(TROUBLES, "text") for line in block.splitlines()]
    assert len(quoted) > 50
    assert {line: parts for line in quoted if (parts := unsaid(line))} == {}


@pytest.mark.parametrize(
    "line",
    ["the prompt has ... tokens; the limt is ...", "got ..., need ...; change ...", "nobody prints this text"],
)
def test_a_message_that_nobody_prints_is_found(line):
    assert unsaid(line)


@pytest.mark.parametrize("path", sorted((ROOT / "examples/receipts").glob("*_*.json")), ids=lambda path: path.stem)
def test_receipts_hold_what_is_said_of_them(path):
    receipt = json.loads(path.read_text())
    step, phases = receipt["step"], receipt["phases"]
    measured, planned = step["peak_bytes"]["8"], step["planned_bytes"]
    assert abs(planned / measured - 1) < 0.1
    assert step["added_by_larger_group"] <= 0.0025
    assert phases["replay_8"]["peak_bytes"] <= 1.0025 * phases["replay_2"]["peak_bytes"]
    assert receipt["finite_difference"]["relative_error"] < 1e-3
    text = (ROOT / "docs/long_context.md").read_text()
    row = f"| {receipt['positions']:,}, {receipt['prefix_grad']} | {measured / 1e6:.2f} / {planned / 1e6:.2f} |"
    assert row in text


def test_scaling_is_what_is_said_of_it():
    result = json.loads((ROOT / "examples/receipts/scaling.json").read_text())
    text = (ROOT / "docs/long_context.md").read_text()
    for longest, one_context in zip(result["longest"], result["ranks"]):
        assert longest["of_linear"] >= 0.95
        cells = [f"| {longest['ranks']} | {longest['positions']:,} | {longest['of_linear']:.2f}"]
        cells.append(f"{one_context['bytes_per_rank'] / 1e6:.2f}")
        assert " | ".join(cells) in text
    first, last = result["lengths"][0], result["lengths"][-1]
    growth = last["positions"] / first["positions"]
    assert last["attention_pairs"] / first["attention_pairs"] <= growth**2
    assert last["matmul_flops"] / first["matmul_flops"] <= growth
