#!/usr/bin/env bash
# Compiles training steps of the layer with the real TPU compiler, without a
# TPU; nothing is executed on one. The last line of stdout is JSON:
#     {"v5p:2x2x1": {"sparsecore_instructions": ..., "seconds": ...,
#      "temp_bytes": ...}, "v6e:2x2": {...}}
# It fails unless
#   * make_train_step, for tables on SparseCores, for tables on the TensorCore
#     of a TPU without SparseCores, and for both, compiles for several chips,
#     in a loop of 4 steps;
#   * a program has one lookup and one update a stack, the update with its
#     optimizer's computation and a learning rate that can change, and
#     exchanges nothing with its host but the sorted ids that it starts with;
#   * those computations give, run on a CPU, what the layer's formulas give;
#   * tests/testing/data/sparsecore_optimizer_steps.json, to which the tests
#     compare optimizers, holds what TensorFlow's computations give now;
#   * a string operation, and a limit of 4,000,000 ids, are refused.
# TensorFlow lowers in one environment (.venv-tpu-kernels, that of
# tpu_kernels.sh), the compiler runs in another (.venv-tpu-compile, 1.3 GB).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
source "$ROOT/scripts/_tpu_environments.sh"

SCRATCH="$(mktemp -d)"
trap 'rm -rf "$SCRATCH"' EXIT
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-3}"

ensure_tpu_compiler
COMPILER="$PYTHON"
ensure_tpu_wheel
_say "the environments took $SECONDS s"

cd "$ROOT"
began=$SECONDS
# TensorFlow says of every SparseCore operation that it lowers it, whatever its
# log level.
PYTHONPATH="$ROOT" "$PYTHON" scripts/tpu_compile/lower.py "$SCRATCH" \
    2> >(grep -v '^I0000' >&2)
"$COMPILER" scripts/tpu_compile/run_computations.py "$SCRATCH"
"$COMPILER" scripts/tpu_compile/compile_programs.py "$SCRATCH"
printf 'all of it took %d s\n' $((SECONDS - began))
cat "$SCRATCH/result.json"
