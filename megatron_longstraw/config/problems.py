"""How a rule says what is wrong."""
from __future__ import annotations

from megatron_longstraw.config.schema import SETTINGS


def problem(got: str, need: str, *names: str) -> str:
    """The message about a value: what it is, what is needed, and the flags (of these fields) to change."""
    return f"got {got}, need {need}; change {' or '.join(SETTINGS[name].flag for name in names)}"


def divides(divisor: int, number: int) -> bool:
    """Also where the divisor is below 1, which is a problem of its own field."""
    return divisor < 1 or number % divisor == 0
