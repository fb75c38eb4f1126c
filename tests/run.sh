#!/usr/bin/env bash
# Runs the tests in an environment of their own.
#
#     bash tests/run.sh                   # everything but the slow tests
#     bash tests/run.sh --slow            # everything
#     bash tests/run.sh -k packaging      # other arguments go to pytest
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/venv.sh"
use_venv test,logging
cd "$venv_root"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Two workers, because many tests start up to eight processes of their own; a file stays on one worker, because its
# tests share what is costly. The timeout is above all that the tests set themselves, whose messages say more.
exec "$venv_python" -m pytest -n 2 --dist loadfile --timeout 900 "$@"
