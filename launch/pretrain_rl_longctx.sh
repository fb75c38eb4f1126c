#!/usr/bin/env bash
''':'
# Trains with RL on long prompts. Three ways to start it, with the same flags:
#
#     bash launch/pretrain_rl_longctx.sh [FLAGS]         # a rank for each GPU here, or two on the CPU
#     torchrun [TORCHRUN FLAGS] launch/pretrain_rl_longctx.sh [FLAGS]
#     srun --ntasks-per-node=1 bash launch/pretrain_rl_longctx.sh [FLAGS]      # inside a Slurm job, on all its nodes
#
# Without flags it runs the quickstart: examples/needle/train.py with the flags below, to which yours are appended, so
# that yours win. Name a configuration, a model, prompts or rollouts of your own (--config, --hf-checkpoint,
# --train-files, --prompt-function, --rollout-file) and it runs megatron_longstraw.train with your flags alone; for a
# run of your own in this form, copy this file and change the groups. Where no parallel size is given, all ranks share
# each prompt (context parallelism). --dry-run or DRY_RUN=1 prints the plan and stops; --help lists the flags.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

MODEL_ARGS=(
    --num-layers 2
    --hidden-size 64
    --num-attention-heads 4
    --vocab-size 64
    --make-vocab-size-divisible-by 64
)
PARALLEL_ARGS=(
    --prefix-grad exact
    --prefix-chunk-tokens 512
    --prompts-per-microbatch 16
)
CKPT_ARGS=(
    --run-dir runs/quickstart
)
ROLLOUT_ARGS=(
    --prompt-function examples.needle.task:task
    --reward-function examples.needle.task:score
    --max-prompt-length 1024
    --max-response-length 2
    --group-size 8
)
RL_ARGS=(
    --train-iters 120
    --train-batch-size 16
    --seed 1
)
OPTIMIZER_ARGS=(
    --lr 2e-3
    --min-lr 1e-4
    --lr-decay-style cosine
    --lr-warmup-iters 5
    --weight-decay 0.0
)

case " ${*//=/ } " in
    *" --config "* | *" --hf-checkpoint "* | *" --train-files "* | *" --prompt-data "* | *" --prompt-function "* | \
        *" --rollout-file "* | *" --load-debug-rollout-data "*)
        program=(megatron_longstraw.train) ;;
    *)
        program=("$root/examples/needle/train.py" "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${CKPT_ARGS[@]}"
            "${ROLLOUT_ARGS[@]}" "${RL_ARGS[@]}" "${OPTIMIZER_ARGS[@]}") ;;
esac

if [ -n "${RANK:-}" ] && [ -n "${WORLD_SIZE:-}" ]; then
    python="${PYTHON_OF_TORCHRUN:-python}"
else
    source "$root/launch/venv.sh"
    use_venv logging
    python="$venv_python"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Megatron's advice for tensor and sequence parallelism: kernels then start in the order they were issued.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# What Megatron-Core and torch.distributed say on every rank about Transformer Engine and names of their own.
quiet="ignore::FutureWarning,ignore::DeprecationWarning,ignore:full scope is deprecated"
quiet+=",ignore:Transformer Engine and Apex are not installed,ignore:Apex is not installed"
export PYTHONWARNINGS="${PYTHONWARNINGS:-$quiet}"
# This checkout comes first, whatever the current folder holds; reward and prompt functions are found in both.
export PYTHONSAFEPATH=1 PYTHONPATH="$root:$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m megatron_longstraw.launch "${program[@]}" "$@"
: <<'PYTHON'
'''
import os
import sys

# torchrun runs this file with Python, to which all of the above is one string. It takes over again as bash.
os.environ["PYTHON_OF_TORCHRUN"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
PYTHON
