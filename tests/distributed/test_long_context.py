"""The receipt of a long context, at a short one."""

import contextlib
import io
import json

import pytest
from long_context_receipt import main

from tests.distributed.launch import run_ranks

SMALL = ["--positions", "700", "--prefix-chunk-tokens", "128", "--max-response-length", "12"]


def receipts(rank, argvs):
    """Exit statuses, and what the tool said."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        return [main(argv) for argv in argvs], said.getvalue()


@pytest.mark.parametrize("prefix_grad", ["exact", "frozen"])
def test_the_loss_falls_along_the_gradient_as_it_says(prefix_grad, tmp_path):
    """Under exact with the prompt captured again, under frozen with its state held fixed; the other one's gradient, or
    one of the two groups left out, is off by far more."""
    path = tmp_path / "receipt.json"
    run_ranks(receipts, 2, [[*SMALL, "--prefix-grad", prefix_grad, "--json", str(path)]])
    receipt = json.loads(path.read_text())
    assert receipt["finite_difference"]["relative_error"] < 2e-3
    walked_back = receipt["phases"]["prefix_backward"]["work"]["attention_backward_pairs"]
    assert (walked_back > 0) == (prefix_grad == "exact")
    step = receipt["step"]
    assert step["peak_bytes"]["2"] <= step["peak_bytes"]["8"] and step["planned_bytes"] > 0


def test_replayed_work_grows_with_the_group_and_captured_work_does_not(tmp_path):
    path = tmp_path / "receipt.json"
    run_ranks(receipts, 2, [[*SMALL, "--json", str(path)]])
    work = {name: phase["work"] for name, phase in json.loads(path.read_text())["phases"].items()}
    for name in ("matmul_flops", "attention_pairs", "attention_backward_pairs"):
        assert work["replay_8"][name] == 4 * work["replay_2"][name] > 0
    # The prompt is run once for both: its own causal pairs, in the first of two layers, shared by two ranks.
    tokens, ranks = 700 - 12 - 1, 2
    pairs = tokens * (tokens + 1) // 2 // ranks
    assert pairs <= work["capture"]["attention_pairs"] < 2 * pairs


def test_a_frozen_capture_goes_on_from_its_files(tmp_path):
    state, path = tmp_path / "state", tmp_path / "receipt.json"
    flags = [*SMALL, "--prefix-grad", "frozen", "--json", str(path)]
    keep = ["--state", str(state), "--state-interval-s", "0"]
    run_ranks(receipts, 2, [flags])
    whole = json.loads(path.read_text())
    run_ranks(receipts, 2, [[*flags, *keep]])
    manifest = json.loads((state / "capture.json").read_text())
    assert manifest["spans"][-1][1] == whole["chunks"]
    # As if stopped after the third chunk.
    (state / "capture.json").write_text(json.dumps(manifest | {"spans": manifest["spans"][:3]}))
    run_ranks(receipts, 2, [[*flags, *keep]])
    resumed = json.loads(path.read_text())
    assert resumed["finite_difference"] == whole["finite_difference"]
    assert resumed["phases"]["capture"]["work"]["attention_pairs"] < whole["phases"]["capture"]["work"]["attention_pairs"]


def test_what_cannot_be_measured_is_refused(tmp_path):
    state = ["--state", str(tmp_path)]
    wrong = [["--positions", "64"], [*SMALL, *state], [*SMALL, "--context-parallel-size", "1"]]
    for statuses, said in run_ranks(receipts, 2, wrong):
        assert statuses == [2, 2, 2]
        assert all(word in said for word in ("--positions 64", "--state", "context_parallel_size 1"))


def test_files_of_another_capture_are_refused(tmp_path):
    keep = ["--prefix-grad", "frozen", "--state", str(tmp_path), "--state-interval-s", "0"]
    for statuses, said in run_ranks(receipts, 2, [[*SMALL, *keep, "--seed", seed] for seed in ("1", "2")]):
        assert statuses == [0, 2] and "another config" in said
