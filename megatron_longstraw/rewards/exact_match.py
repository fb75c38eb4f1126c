"""Reward 1 for the accepted answer, character by character."""
from __future__ import annotations

from typing import Any

import numpy as np


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None) -> float:
    """1.0 when the response equals the answer, both without surrounding white space, else 0.0.

    Args:
        ground_truth: the answer, or a list of accepted answers; numbers are compared as they print.

    Raises:
        ValueError: there is no answer to compare with.
    """
    answers = ground_truth if isinstance(ground_truth, (list, tuple, set, np.ndarray)) else [ground_truth]
    if len(answers) == 0 or any(answer is None for answer in answers):
        raise ValueError(
            f"got ground_truth {ground_truth!r} from data source {data_source!r}; need an answer or a list of answers; "
            f"check the answer column of the prompt file"
        )
    return float(solution_str.strip() in {str(answer).strip() for answer in answers})
