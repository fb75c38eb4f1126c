"""What the answers of this example are worth."""
from __future__ import annotations

import re


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """1.0 when the response names the right number and no other, else 0.0."""
    return float(set(re.findall(r"\d+", solution_str)) == {ground_truth})
