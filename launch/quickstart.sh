#!/usr/bin/env bash
# Trains the quickstart task on this machine's GPUs, or on two CPU cores where there are none.
#
#     bash launch/quickstart.sh [TRAINING FLAGS]        # e.g. --seed 2 --run-dir runs/second
#
# Later flags win, so yours do. Results go to ./runs/quickstart.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
use_venv logging

gpus="$("$venv_python" -c 'import torch; print(torch.cuda.device_count())')"
ranks=$((gpus > 0 ? gpus : 2))
if [ "$gpus" -eq 0 ]; then
    echo "no GPU found: 2 ranks on the CPU that share each prompt (context parallel size 2)"
elif [ "$gpus" -eq 1 ]; then
    echo "1 GPU found: 1 rank, no context parallelism"
else
    echo "$gpus GPUs found: $gpus ranks that share each prompt (context parallel size $gpus)"
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# What Megatron-Core and torch.distributed say on every rank about Transformer Engine and names of their own.
quiet="ignore::FutureWarning,ignore::DeprecationWarning,ignore:full scope is deprecated"
quiet+=",ignore:Transformer Engine and Apex are not installed,ignore:Apex is not installed"
export PYTHONWARNINGS="${PYTHONWARNINGS:-$quiet}"
# Not by the name torchrun, which would be another environment's, or point to where this checkout was before a move.
exec "$venv_python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    "$venv_root/examples/needle/train.py" --config "$venv_root/examples/needle/quickstart.toml" \
    --context-parallel-size "$ranks" "$@"
