"""What is wrong with a model folder."""
from __future__ import annotations

from pathlib import Path

SHOWN = 20
"""Problems listed; a folder of another model has thousands."""


class FolderError(ValueError):
    """A model folder cannot be used; the message lists the problems, one a line."""

    def __init__(self, folder: Path, problems: list[str]):
        self.folder, self.problems = folder, list(problems)
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        hidden = len(problems) - SHOWN
        tail = [f"and {hidden} more"] if hidden > 0 else []
        super().__init__("\n  - ".join([f"{folder} has {count}:", *problems[:SHOWN], *tail]))

    def __reduce__(self):
        # Rank 0 sends what it found to the others, and pickle would rebuild an error from its message alone.
        return type(self), (self.folder, self.problems)
