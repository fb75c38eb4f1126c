#!/usr/bin/env bash
# Trains the quickstart task on this machine's GPUs, or on two CPU cores where there are none.
#
#     bash launch/quickstart.sh [TRAINING FLAGS]        # e.g. --seed 2 --run-dir runs/second
#
# Later flags win, so yours do. Results go to ./runs/quickstart.
exec bash "$(dirname "${BASH_SOURCE[0]}")/pretrain_rl_longctx.sh" "$@"
