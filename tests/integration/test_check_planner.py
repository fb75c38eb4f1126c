"""The tools that measure a machine for the planner and hold its seconds against steps."""
import json

import pytest
import torch

import calibrate
from check_planner import check_seconds
from megatron_longstraw.planner.hardware import CALIBRATED, hardware_of
from tests.orphans import assert_none_is_left

TINY = dict(num_layers=2, hidden_size=32, ffn_hidden_size=64, vocab_size=100, max_prompt_length=33, max_response_length=4)


def test_seconds_are_compared_call_by_call_with_the_rates_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate, "BUDGET_S", 0.0)
    monkeypatch.setattr(calibrate, "REFERENCE", TINY)
    monkeypatch.setattr(calibrate, "ROUNDS", 1)
    file = tmp_path / "cpu.json"
    file.write_text(json.dumps(calibrate.calibrate(torch.float32)))
    hardware = hardware_of("cpu", str(file))
    for name in CALIBRATED:
        assert 0 < getattr(hardware, name).seconds(1e6) < getattr(hardware, name).seconds(1e8)
    for call in ("capture", "rollout", "replay", "prefix_backward"):
        assert set(hardware.corrections[call]) == {"work", "cp", "tp", "pp"}
    assert set(hardware.corrections["optimizer"]) == {"work", "dp"}
    rows = check_seconds("tiny", TINY, str(file), repeats=1)
    assert [row["call"] for row in rows] == ["capture", "rollout", "replay", "prefix_backward", "optimizer", "all"]
    assert all(row["planned"] > 0 and row["measured"] > 0 for row in rows)
    *calls, total = rows
    for column in ("planned", "measured"):
        assert total[column] == pytest.approx(sum(row[column] for row in calls))
    assert_drift_is_to_the_step_of_the_same_layout(file, total["drift"])


def assert_drift_is_to_the_step_of_the_same_layout(file, drift):
    """As if the machine had been 1000 times slower when it was calibrated; tiny steps vary by some times."""
    assert 0.1 < drift < 10
    rates = json.loads(file.read_text())
    assert [reference["options"] for reference in rates["references"]] == [
        TINY | {"bf16": False} | layout for layout in calibrate.LAYOUTS
    ]
    calls = rates["references"][0]["seconds"]
    rates["references"][0]["seconds"] = {call: 1000 * seconds for call, seconds in calls.items()}
    file.write_text(json.dumps(rates))
    [*_, total] = check_seconds("tiny", TINY, str(file), repeats=1)
    assert 1e-4 < total["drift"] < 1e-2
    assert total["ratio_at_speed"] == pytest.approx(total["planned"] / total["measured"] * total["drift"])


HELD = """
from calibrate import peers

if __name__ == "__main__":
    with peers(2, num_threads=1):
        die()
"""


def test_nothing_of_a_killed_calibration_is_left(tmp_path):
    assert_none_is_left(HELD, tmp_path)


def test_points_only_grow():
    assert calibrate.growing([(4, 2.0), (1, 1.0), (2, 3.0), (8, 4.0)]) == [(1, 1.0), (2, 3.0), (8, 4.0)]
