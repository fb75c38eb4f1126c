"""That all ranks run the same code, with the same options, on the same prompts; found at the start, not in a hang."""
from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Sequence

import torch.distributed as dist

from megatron_longstraw.config import Config, ConfigError, to_toml
from megatron_longstraw.types import PromptGroup, prompt_digest

PACKAGE = Path(__file__).parent
_NEEDED = {
    "code": "install the same version everywhere",
    "functions": "let every rank find the same files of --reward-function and --prompt-function",
    "configuration": "start every rank with the same flags and files",
    "prompts": "let every rank read the same prompt files; a --prompt-function must not depend on the rank",
}


def check_ranks_agree(config: Config, prompts: list[PromptGroup], functions: Sequence[bytes] = ()) -> None:
    """A call of all ranks.

    Args:
        prompts: those of the first step.
        functions: the source of the user's functions.

    Raises:
        ConfigError: on every rank, naming what differs and on which ranks.
    """
    own = {
        "code": _hash(*(part for path in sorted(PACKAGE.rglob("*.py")) for part in (path.name.encode(), path.read_bytes()))),
        "functions": _hash(*functions),
        "configuration": _hash(to_toml(config).encode()),
        "prompts": _hash(*(f"{group.group_id!r} {prompt_digest(group.prompt_ids)}".encode() for group in prompts)),
    }
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    problems = []
    for what, need in _NEEDED.items():
        different = [rank for rank, hashes in enumerate(everyone) if hashes[what] != everyone[0][what]]
        if different:
            ranks = ", ".join(map(str, different[:8])) + (" ..." if len(different) > 8 else "")
            problems.append(f"rank {ranks} has other {what} than rank 0; {need}")
    if problems:
        raise ConfigError(problems)


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
