"""The pages of the documentation, and what stands in their fenced blocks."""
from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def files(page: Path) -> dict[str, str]:
    """Files that a page shows in full: the block after <!-- file: NAME -->."""
    found = re.findall(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return dict(found)


def prose(page: Path) -> str:
    """Without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def code_spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))
