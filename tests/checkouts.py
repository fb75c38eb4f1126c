"""This project in a folder of its own, with an environment that is made already, for tests of its scripts."""
from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINKED = ("megatron_longstraw", "examples")
COPIED = (
    "launch/pretrain_rl_longctx.sh",
    "launch/quickstart.sh",
    "launch/venv.sh",
    "launch/slurm/pretrain_rl_longctx.sbatch",
    "tools/submit_slurm.py",
    "setup.cfg",
    "pyproject.toml",
    "constraints.txt",
)
"""They look for the others next to themselves."""
FAKE_VENV_PYTHON = f"""#!/usr/bin/env bash
if [ "${{1:-}} ${{2:-}}" = "-m pip" ]; then exit 0; fi
exec {sys.executable} "$@"
"""
"""The Python of these tests in the place of .venv: pip has nothing to do."""


def environment(**variables) -> dict[str, str]:
    dropped = ("PYTHONPATH", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DRY_RUN")
    kept = {name: value for name, value in os.environ.items() if name not in dropped and not name.startswith("SLURM_")}
    return {**kept, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in variables.items()}}


def make_checkout(root: Path) -> Path:
    for name in COPIED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text((ROOT / name).read_text())
    for name in LINKED:
        (root / name).symlink_to(ROOT / name)
    python = root / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_VENV_PYTHON)
    python.chmod(0o755)
    return root
