"""bench_peers on a tiny shape: everyone computes the same gradient on one Hugging Face folder. Never times."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bench_peers
from megatron_longstraw.config import ConfigError

TOOL = Path(__file__).parents[2] / "tools" / "bench_peers.py"
SHAPE = {"num_layers": 2, "hidden_size": 64, "vocab_size": 250, "group_size": 3}
TINY = (
    " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SHAPE.items())
    + " --ffn-hidden-size 96 --prompt-tokens 150 --response-tokens 7 --repeats 1"
    " --prefix-chunk-tokens 64 --prefix-block-tokens 100"
)
LIMIT = 1e-5
"""Twice what float32 gradients may be off elsewhere: a softmax nearly cancels the gradient of the keys' bias."""


def run_tool(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(TOOL), *TINY.split(), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def result_of(contenders: str) -> dict:
    done = run_tool("--contenders", contenders, "--json", "-")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def result() -> dict:
    return result_of("hf,exact,frozen")


def assert_agrees(cost: dict):
    wrong = {name: error for name, error in cost["param_rel_err"].items() if not error <= LIMIT}
    assert not wrong, wrong


@pytest.mark.slow
def test_this_project_agrees_with_transformers_on_every_parameter(result):
    contenders = result["contenders"]
    assert list(contenders) == ["hf", "exact", "frozen"]
    parameters = contenders["hf"]["param_rel_err"].keys()
    assert len(parameters) == 2 * 12 + 3 and "model.layers.1.self_attn.v_proj.bias" in parameters
    for cost in contenders.values():
        assert cost["param_rel_err"].keys() == parameters
        assert cost["total_s"] > 0 and cost["peak_bytes"] > 0
    assert_agrees(contenders["exact"])
    assert contenders["frozen"]["worst_param_rel_err"] > 0.05, "frozen leaves the prompt's share out"


@pytest.mark.slow
def test_the_configuration_is_reported(result):
    config = result["config"]
    assert {name: config[name] for name in SHAPE} == SHAPE
    assert (config["prompt_tokens"], config["response_tokens"], config["repeats"]) == (150, 7, 1)
    assert config["threads"] == int(os.environ["OMP_NUM_THREADS"])
    assert config["versions"]["transformers"].startswith("5.")


@pytest.mark.slow
@pytest.mark.parametrize(
    "library, contenders",
    [("trl", ["trl", "trl_lean"]), ("prefix_grouper", ["prefix_grouper", "prefix_grouper_recompute"])],
)
def test_the_library_agrees_with_transformers_on_every_parameter(library, contenders):
    pytest.importorskip(library, reason="comes with the extra peers, which the tests do not install")
    costs = result_of(",".join(["hf", *contenders]))["contenders"]
    for name in contenders:
        assert_agrees(costs[name])
    plain, saving = (costs[name]["peak_bytes"] for name in contenders)
    assert saving < plain


@pytest.mark.slow
def test_a_table_without_the_reference_has_no_errors():
    done = run_tool("--contenders", "frozen")
    assert done.returncode == 0, done.stderr[-4000:]
    header, row = done.stdout.splitlines()
    assert header.split()[:2] == ["contender", "seconds"] and "error" in header
    assert row.split()[0] == "frozen" and row.split()[-1] == "-"


def test_a_library_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr(bench_peers.Trl, "library", "no_such_library")
    with pytest.raises(ConfigError) as error:
        bench_peers.parse(["--contenders", "hf,trl,exact,trl_lean"])
    (line,) = error.value.problems
    assert "no_such_library" in line and "pip install -e '.[peers]'" in line and line.endswith("--contenders hf,exact")
    assert bench_peers.parse(["--contenders", "hf,exact"])[1].contenders == ["hf", "exact"]


@pytest.mark.parametrize(
    "flag, value, word", [("--num-query-groups", "3", "num_query_groups"), ("--group-size", "1", "advantage")]
)
def test_an_impossible_case_is_refused_before_any_process_starts(flag, value, word):
    with pytest.raises(ConfigError, match=word):
        bench_peers.parse(["--contenders", "hf", flag, value])


@pytest.mark.parametrize("names", ["hf,fast", "hf,hf", ""])
def test_unknown_contenders_are_refused(names, capsys):
    with pytest.raises(SystemExit):
        bench_peers.parse(["--contenders", names])
    assert "prefix_grouper_recompute" in capsys.readouterr().err
