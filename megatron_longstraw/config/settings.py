"""One field of the configuration: what it accepts, and how texts and TOML values become it.

A field says everything about itself once, through `option(...)` in schema.py; flags, TOML, help and checks
are all derived from that.
"""
from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from typing import Any

_BYTE_SUFFIXES = {"": 1, "k": 2**10, "kib": 2**10, "m": 2**20, "mib": 2**20, "g": 2**30, "gib": 2**30}


class ConfigError(ValueError):
    """The configuration cannot be used; the message lists every problem, one a line."""

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__("\n  - ".join([f"the configuration has {count}:", *self.problems]))

    def __reduce__(self):
        # Ranks tell each other what they found, and pickle would rebuild an error from its message alone.
        return type(self), (self.problems,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """What `option(...)` records about a field, beside its type and default."""

    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    pattern: str | None = None
    """Regular expression that a text value matches as a whole; `form` says it in words."""
    form: str = ""
    hint: str = ""
    """Added to the message when a value is refused."""
    aliases: tuple[str, ...] = ()
    """More flags for the same field, without the leading dashes."""
    is_bytes: bool = False
    """The value is a number of bytes and may be written with a suffix."""


def option(default: Any, help: str, **facts: Any) -> Any:
    """A dataclass field with its default, its help and the keyword facts of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help=help, **facts)})


def parse_bytes(text: str) -> int:
    """Number of bytes of "4096", "512M", "1.5GiB". K, M, G are powers of 1024, as KiB, MiB, GiB are.

    Raises:
        ValueError: the text is not a number with one of these suffixes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _BYTE_SUFFIXES:
        raise ValueError(f"got {text!r}, need a number of bytes, plain or with K, M, G, KiB, MiB or GiB")
    number = int(match[1]) if match[1].isdigit() else float(match[1])
    return int(number * _BYTE_SUFFIXES[match[2]])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of one section, as flags and TOML see it."""

    section: str
    name: str
    type: type
    """bool, int, float, str, or tuple (of `item_type`)."""
    optional: bool
    default: Any
    option: Option
    item_type: type | None = None
    """int or str, of a tuple."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> list[str]:
        return [self.flag, *("--" + alias for alias in self.option.aliases)]

    def from_text(self, text: str | list[str]) -> Any:
        """The value a flag's text stands for; the text itself where it stands for none (see `problem`)."""
        if self._means_none(text):
            return None
        try:
            if self.type is tuple:
                return tuple(self.item_type(item) for item in text)
            if self.option.is_bytes:
                return parse_bytes(text)
            return self.type(text) if self.type in (int, float) else text
        except ValueError:
            return text

    def from_value(self, value: Any) -> Any:
        """The value a TOML or Python value stands for; the same value where it stands for none."""
        if self._means_none(value):
            return None
        if self.type is tuple and isinstance(value, list):
            return tuple(value)
        if self.type is float and type(value) is int:
            return float(value)
        if self.option.is_bytes and isinstance(value, str):
            return self.from_text(value)
        return value

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value, in words, or None."""
        if (value is None and self.optional) or (self.has_type(value) and self._in_range(value)):
            return None
        hint = f" ({self.option.hint})" if self.option.hint else ""
        return f"{self.section}.{self.name}: got {value!r}, need {self.needs()}{hint}; change {self.flag}"

    def has_type(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if self.type is tuple:
            return isinstance(value, tuple) and all(type(item) is self.item_type for item in value)
        # bool is a subclass of int, yet `true` is no number of ranks
        return type(value) is self.type or (self.type is float and type(value) is int)

    def needs(self) -> str:
        """The accepted values in words."""
        facts = self.option
        if facts.choices:
            words = " or ".join(facts.choices)
        elif facts.form:
            words = facts.form
        elif facts.is_bytes:
            words = "a number of bytes, plain or with K, M, G, KiB, MiB or GiB"
        else:
            words = {
                bool: "true or false",
                int: "a whole number",
                float: "a finite number",
                str: "a text",
                tuple: "a list of texts" if self.item_type is str else "a list of whole numbers",
            }[self.type]
        bounds = ((">=", facts.minimum), ("<=", facts.maximum), ("above", facts.above), ("below", facts.below))
        limits = " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)
        return " ".join(filter(None, [words, limits, "or none" if self.optional else ""]))

    def _means_none(self, value: Any) -> bool:
        # TOML has no null, and a flag has to be able to undo what a file set.
        return self.optional and value == "none" and "none" not in self.option.choices

    def _in_range(self, value: Any) -> bool:
        facts = self.option
        if isinstance(value, str):
            matches = facts.pattern is None or re.fullmatch(facts.pattern, value) is not None
            return matches and (not facts.choices or value in facts.choices)
        if self.item_type is str:
            return all(value)
        numbers = value if isinstance(value, tuple) else (value,)
        return all(
            (isinstance(number, int) or math.isfinite(number))
            and (facts.minimum is None or number >= facts.minimum)
            and (facts.maximum is None or number <= facts.maximum)
            and (facts.above is None or number > facts.above)
            and (facts.below is None or number < facts.below)
            for number in numbers
        )


def settings_of(section: str, section_type: type) -> list[Setting]:
    """The settings of a section's dataclass, in its order."""
    hints = typing.get_type_hints(section_type)
    settings = []
    for field in dataclasses.fields(section_type):
        hint = hints[field.name]
        optional = isinstance(hint, types.UnionType)
        if optional:
            hint = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
        settings.append(
            Setting(
                section=section,
                name=field.name,
                type=typing.get_origin(hint) or hint,
                item_type=next(iter(typing.get_args(hint)), None),
                optional=optional,
                default=field.default,
                option=field.metadata["option"],
            )
        )
    return settings
