#!/usr/bin/env bash
# Kills training runs at random moments, again and again, and looks at what is left.
#
#     bash tests/faults.sh                     # 30 kills
#     bash tests/faults.sh --kill-seed 7       # at other moments; other arguments go to pytest too
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/venv.sh"
use_venv test,logging
cd "$venv_root"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv_python" -m pytest tests/distributed/test_kills.py --kills 30 --timeout 3600 "$@"
