"""Defaults < TOML files left to right < flags, and back to TOML."""
from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import tomllib
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

from megatron_longstraw.config.schema import SECTIONS, SETTINGS, Config
from megatron_longstraw.config.settings import ConfigError, Setting

_FILES_DEST = "config_files"
# Keeps the attributes of a tool's own flags and those of the configuration apart in one namespace.
_DEST_PREFIX = "config."


def load_config(
    toml_paths: Sequence[str | os.PathLike] = (),
    overrides: Mapping[str, Any] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration of `defaults` (field name -> value, in place of the schema's), then of some TOML files, later
    ones winning, and then of `overrides` (field name -> value).

    Raises:
        ConfigError: a file cannot be read, a section or key is unknown, or a value is not accepted; all at once.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    _merge_fields(defaults, values, problems)
    for path in toml_paths:
        _merge_file(Path(path), values, problems)
    _merge_fields(overrides, values, problems)
    if problems:
        raise ConfigError(problems)
    return _assemble(values)


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--config FILE` and one flag per field to a tool's parser, and turns abbreviated flags off."""
    parser.allow_abbrev = False  # an abbreviation would change its meaning as fields are added
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        dest=_FILES_DEST,
        metavar="FILE",
        help="TOML file; repeatable, later files win over earlier ones and flags over all",
    )
    for section, section_type in SECTIONS.items():
        group = parser.add_argument_group(section, section_type.__doc__)
        for setting in SETTINGS.values():
            if setting.section == section:
                _add_flag(group, setting)


def config_from_args(
    namespace: argparse.Namespace,
    defaults: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration that a namespace of a parser with config flags asks for: `defaults` lose to its files,
    `overrides` win over its flags.

    Raises:
        ConfigError: see `load_config`.
    """
    flags = {}
    for name, setting in SETTINGS.items():
        if hasattr(namespace, _DEST_PREFIX + name):
            given = getattr(namespace, _DEST_PREFIX + name)
            flags[name] = given if setting.type is bool else setting.from_text(given)
    return load_config(getattr(namespace, _FILES_DEST), flags | dict(overrides or {}), defaults=defaults)


def parse_args(
    argv: Sequence[str] | None = None,
    *,
    extra: argparse.ArgumentParser | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Config | tuple[Config, argparse.Namespace]:
    """The configuration of a command line (None: this process's).

    With `extra`, a tool's own parser, the config flags are added to it and (config, namespace) is returned; the
    namespace carries the tool's flags. `defaults`: fields that a tool sets otherwise than the schema.

    Raises:
        ConfigError: see `load_config`; and for flags that neither the configuration nor the tool has.
    """
    parser = extra or argparse.ArgumentParser(usage="%(prog)s [--config FILE ...] [--FLAG VALUE ...]")
    add_config_flags(parser)
    namespace, unknown = parser.parse_known_args(argv)
    problems = _unknown_arguments(unknown)
    try:
        config = config_from_args(namespace, defaults)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return config if extra is None else (config, namespace)


def positive_int(text: str) -> int:
    """For flags of a tool's own (argparse's `type`)."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, need at least 1")
    return number


def to_toml(config: Config) -> str:
    """The configuration as TOML text; `load_config` of it gives an equal one. Unset fields are comments."""
    lines = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        for field in dataclasses.fields(SECTIONS[section]):
            value = getattr(getattr(config, section), field.name)
            lines.append(f"# {field.name} is unset" if value is None else f"{field.name} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def load_toml(text: str) -> Config:
    """The configuration of a text that `to_toml` wrote, without what this version knows no more."""
    values = {
        key: value
        for table in tomllib.loads(text).values()
        for key, value in table.items()
        if key in SETTINGS and SETTINGS[key].problem(SETTINGS[key].from_value(value)) is None
    }
    return _assemble({key: SETTINGS[key].from_value(value) for key, value in values.items()})


def changed_settings(before: Config, after: Config) -> list[str]:
    """One line per field whose value differs, with both values. Where checkpoints are is no difference."""
    lines = []
    for setting in SETTINGS.values():
        old, new = (getattr(getattr(config, setting.section), setting.name) for config in (before, after))
        if old != new and setting.section != "checkpoint":
            lines.append(f"{setting.name} {old} -> {new}")
    return lines


def _assemble(values: Mapping[str, Any]) -> Config:
    sections = {
        section: section_type(
            **{name: value for name, value in values.items() if SETTINGS[name].section == section}
        )
        for section, section_type in SECTIONS.items()
    }
    return Config(**sections, given=frozenset(values))


def _merge_fields(fields: Mapping[str, Any] | None, values: dict[str, Any], problems: list[str]) -> None:
    for name, value in (fields or {}).items():
        if name in SETTINGS:
            _set(SETTINGS[name], value, "", values, problems)
        else:
            problems.append(f"unknown field {name}{_did_you_mean_key(name)}")


def _merge_file(path: Path, values: dict[str, Any], problems: list[str]) -> None:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{path}: cannot be read ({error.strerror}); change --config")
        return
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{path}: is not TOML ({error})")
        return
    for section, table in tables.items():
        if section not in SECTIONS:
            problems.append(f"{path}: {_unknown_top_level(section, table)}")
        elif not isinstance(table, dict):
            problems.append(f"{path}: got {section} = {table!r}, need a table [{section}]")
        else:
            for key, value in table.items():
                setting = SETTINGS.get(key)
                if setting is None:
                    problems.append(f"{path}: unknown key {key} in [{section}]{_did_you_mean_key(key)}")
                elif setting.section != section:
                    problems.append(f"{path}: unknown key {key} in [{section}]; it belongs in [{setting.section}]")
                else:
                    _set(setting, value, f"{path}: ", values, problems)


def _set(setting: Setting, value: Any, where: str, values: dict[str, Any], problems: list[str]) -> None:
    value = setting.from_value(value)
    problem = setting.problem(value)
    if problem is None:
        values[setting.name] = value
    else:
        problems.append(where + problem)


def _add_flag(group: argparse._ArgumentGroup, setting: Setting) -> None:
    default = "unset" if setting.default is None else setting.default
    common = {
        "dest": _DEST_PREFIX + setting.name,
        "default": argparse.SUPPRESS,  # only flags that were typed may win over the files
        "help": f"{setting.option.help} (default: {default})".replace("%", "%%"),
    }
    if setting.type is bool:
        group.add_argument(*setting.flags, action=argparse.BooleanOptionalAction, **common)
        return
    metavar = {int: "N", float: "X", str: "TEXT"}.get(setting.item_type or setting.type)
    if setting.option.choices:
        metavar = "{" + ",".join(setting.option.choices) + "}"
    # Texts are converted by the setting itself, so that flags and TOML are judged by the same words.
    group.add_argument(*setting.flags, metavar=metavar, nargs="*" if setting.type is tuple else None, **common)


def _unknown_top_level(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"unknown section [{name}]{_did_you_mean(name, SECTIONS)}"
    return f"unknown key {name} outside any section{_did_you_mean_key(name)}"


def _did_you_mean_key(name: str) -> str:
    spellings = {key: key for key in SETTINGS}
    for key, setting in SETTINGS.items():
        spellings.update({alias.replace("-", "_"): key for alias in setting.option.aliases})
    match = _closest(name.replace("-", "_"), spellings)
    if match is None:
        return ""
    setting = SETTINGS[spellings[match]]
    return f"; did you mean {setting.name} in [{setting.section}]?"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    match = _closest(name, known)
    return "" if match is None else f"; did you mean {match}?"


def _closest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name.lower(), list(known), n=1)), None)


def _unknown_arguments(arguments: Sequence[str]) -> list[str]:
    known = ["--config", *(flag for setting in SETTINGS.values() for flag in setting.flags)]
    known += [flag.replace("--", "--no-", 1) for s in SETTINGS.values() if s.type is bool for flag in s.flags]
    flags = [
        argument.partition("=")[0]
        for argument in arguments
        if argument.startswith("-") and not argument[1:2].isdigit()
    ]
    if not flags:
        return [f"unexpected argument {argument!r}; every value needs a flag" for argument in arguments]
    # Whatever does not start with a dash is most likely the value of an unknown flag.
    return [f"unknown flag {flag}{_did_you_mean(flag.replace('_', '-'), known)}" for flag in flags]


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
