"""docs/configuration.md from the dataclasses in megatron_longstraw/config/schema.py, which say everything about an option.

    python tools/config_reference.py --write        # after a change of an option
    python tools/config_reference.py --check        # exit status 1 where the file is not what --write would make
    python tools/config_reference.py                # to the screen
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_longstraw.config import SECTIONS, SETTINGS, Config, Setting, to_toml

FILE = ROOT / "docs/configuration.md"
KINDS = {bool: "boolean", int: "integer", float: "number", str: "text"}
ANY_TEXT = "a text"
"""Form of texts that need only not be empty."""
HEAD = """\
# Configuration

<!-- Made by tools/config_reference.py --write; change the options in megatron_longstraw/config/schema.py instead. -->

Every option is a key in a TOML file and a flag. The same setting in both forms:

```toml
[rollout]
group_size = 8
stop_token_ids = [2, 7]
```

```bash
python -m megatron_longstraw.train --config my_run.toml --group-size 8 --stop-token-ids 2 7
```

- Defaults < files of `--config` from left to right < flags. A flag counts wherever it stands on the line.
- The key of a flag is its name with underscores, in the section whose table lists it below.
- boolean: `--bf16` and `--no-bf16`; `bf16 = true` and `bf16 = false`.
- list: values after the flag, no value for an empty list; an array in TOML.
- bytes: a number, or `--prefix-state-budget 20GiB`; K, M and G are powers of 1024, as KiB, MiB and GiB are.
- Where `none` is accepted, `--max-prompt-length none` and `max_prompt_length = "none"` undo what an earlier file has set.
- An unknown key or flag is an error that names the closest one; so is a value outside the bounds. All problems of a
  command line are reported together, before a rank starts.
- Options must also fit each other and the number of ranks (`megatron_longstraw/config/rules.py`); each such message
  says what it got, what it needs, and which flag to change.
- The configuration of a run, defaults filled in, is `config.toml` in its run folder. `--config` takes that file.

An option that is unset follows from others or is off; its description says which."""


def reference() -> str:
    """The whole page."""
    defaults = dict(line.split(" = ", 1) for line in to_toml(Config()).splitlines() if " = " in line)
    lines = [HEAD, "", "Sections: " + ", ".join(f"[{section}](#{section})" for section in SECTIONS) + "."]
    for section, kind in SECTIONS.items():
        lines += ["", f"## {section}", "", " ".join(kind.__doc__.split()), "", *_table(section, defaults)]
    return "\n".join(lines) + "\n"


def _table(section: str, defaults: dict[str, str]) -> Iterator[str]:
    yield "| flag | type | accepts | default | what |"
    yield "|---|---|---|---|---|"
    for setting in SETTINGS.values():
        if setting.section == section:
            default = f"`{defaults[setting.name]}`" if setting.name in defaults else "unset"
            cells = [_flags(setting), _kind(setting), _accepted(setting), default, _what(setting)]
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _flags(setting: Setting) -> str:
    first, *aliases = (f"`{flag}`" for flag in setting.flags)
    return first + (f" (also {', '.join(aliases)})" if aliases else "")


def _kind(setting: Setting) -> str:
    if setting.option.is_bytes:
        return "bytes"
    return f"list of {KINDS[setting.item_type]}s" if setting.type is tuple else KINDS[setting.type]


def _accepted(setting: Setting) -> str:
    """Choices, form or bounds, and whether none is a value."""
    facts = setting.option
    bounds = ((">=", facts.minimum), (">", facts.above), ("<=", facts.maximum), ("<", facts.below))
    words = [f"`{choice}`" for choice in facts.choices]
    words = words or [f"`{sign} {bound:g}`" for sign, bound in bounds if bound is not None]
    if facts.form and facts.form != ANY_TEXT:
        words = [facts.form]
    return ", ".join(words + ["`none`"] * (setting.optional and "none" not in facts.choices))


def _what(setting: Setting) -> str:
    return setting.option.help + (f" ({setting.option.hint})" if setting.option.hint else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="write docs/configuration.md")
    action.add_argument("--check", action="store_true", help="compare it, and say so where it differs")
    args = parser.parse_args(argv)
    if args.write:
        FILE.write_text(reference(), encoding="utf-8")
    elif not args.check:
        print(reference(), end="")
    elif not FILE.exists() or FILE.read_text(encoding="utf-8") != reference():
        print(f"{FILE} is not what the options say; run python tools/config_reference.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
