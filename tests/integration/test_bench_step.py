"""bench_step on a tiny shape: structure, token counts, gradient errors. Never times."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bench_step
from megatron_longstraw.config import ConfigError

TOOL = Path(__file__).parents[2] / "tools" / "bench_step.py"
PROMPT, GROUP, RESPONSE = 150, 3, 7
TINY = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --vocab-size 250 --init-method-std 0.08"
    f" --prompt-tokens {PROMPT} --group-size {GROUP} --response-tokens {RESPONSE} --prefix-chunk-tokens 64"
    " --prefix-block-tokens 100 --branches-per-microbatch 2 --repeats 1"
)


def run_tool(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(TOOL), *TINY.split(), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def result() -> dict:
    done = run_tool("--json", "-")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_every_schedule_reports_the_same_facts(result):
    assert list(result["schedules"]) == ["full", "full_recompute", "packed", "exact", "frozen"]
    for cost in result["schedules"].values():
        assert set(cost) == {"total_s", "cpu_s", "calls_s", "peak_bytes", "tokens", "worst_param_rel_err"}
        assert set(cost["calls_s"]) == set(cost["tokens"])
        assert 0 < sum(cost["calls_s"].values()) <= cost["total_s"]
        assert cost["peak_bytes"] > 0
    config = result["config"]
    assert (config["prompt_tokens"], config["group_size"], config["response_tokens"]) == (PROMPT, GROUP, RESPONSE)
    assert config["hidden_size"] == 64 and config["num_query_groups"] == 2


@pytest.mark.slow
def test_tokens_through_the_stack(result):
    tokens = {name: cost["tokens"] for name, cost in result["schedules"].items()}
    full = {"full": GROUP * (PROMPT + RESPONSE - 1)}
    assert tokens["full"] == tokens["full_recompute"] == full
    assert tokens["packed"] == {"packed": PROMPT + GROUP * (RESPONSE - 1)}
    assert tokens["frozen"] == {"capture": PROMPT - 1, "replay": GROUP * RESPONSE}
    assert tokens["exact"] == tokens["frozen"] | {"prefix_backward": PROMPT - 1}


@pytest.mark.slow
def test_gradients_against_full(result):
    errors = {name: cost["worst_param_rel_err"] for name, cost in result["schedules"].items()}
    assert errors["full"] == 0
    for name in ("full_recompute", "packed", "exact"):
        assert errors[name] < 5e-6, name
    assert errors["frozen"] > 0.05, "frozen leaves the prompt's share out"


@pytest.mark.slow
def test_ratios_are_those_of_the_numbers(result):
    schedules, ratios = result["schedules"], result["ratios"]
    for ours in ("exact", "frozen"):
        for theirs in ("full", "full_recompute", "packed"):
            a, b = schedules[ours], schedules[theirs]
            assert ratios[f"{ours}_speedup_over_{theirs}"] == pytest.approx(b["total_s"] / a["total_s"])
            assert ratios[f"{ours}_peak_over_{theirs}"] == pytest.approx(a["peak_bytes"] / b["peak_bytes"])
    assert ratios["replay_per_token_over_last_capture_chunk"] > 0


@pytest.mark.slow
def test_peak_bytes_repeat_and_are_written_to_a_file(result, tmp_path):
    file = tmp_path / "bench.json"
    done = run_tool("--schedules", "exact,packed", "--json", str(file))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-4000:]
    again = json.loads(file.read_text())["schedules"]
    assert list(again) == ["exact", "packed"]
    for name, cost in again.items():
        assert cost["peak_bytes"] == result["schedules"][name]["peak_bytes"]
        assert cost["worst_param_rel_err"] is None, "nothing to compare with when full is left out"


@pytest.mark.parametrize(
    "flags, word", [("--num-query-groups 3", "num_query_groups"), ("--context-parallel-size 2", "context")]
)
def test_an_impossible_configuration_is_refused_before_any_process_starts(flags, word):
    with pytest.raises(ConfigError, match=word):
        bench_step.parse([*TINY.split(), *flags.split()])


def test_unknown_schedules_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench_step.parse(["--schedules", "exact,fast"])
    assert "frozen" in capsys.readouterr().err


def test_precedence_of_defaults_files_flags_and_schedules(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[model]\nnum_layers = 8\nhidden_size = 512\n[parallel]\nrecompute_granularity = 'full'\n")
    configs, _ = bench_step.parse(["--config", str(file), "--num-layers", "6"])
    models = {(c.model.num_layers, c.model.hidden_size, c.model.vocab_size) for c in configs.values()}
    assert models == {(6, 512, bench_step.DEFAULTS["vocab_size"])}
    recomputes = {name for name, config in configs.items() if config.parallel.recompute_granularity}
    assert recomputes == {"full_recompute", "packed", "exact", "frozen"}
    assert configs["exact"].prefix.prefix_out_tier == "device" and configs["frozen"].prefix.prefix_out_tier == "none"
