#!/usr/bin/env bash
# Tests SparseCore code against TensorFlow's own host kernels, which only the
# wheel for TPUs has; no TPU is needed, nor looked for:
#   * the kernels that the emulator does in NumPy equal them, bit for bit;
#   * the emulator's tests pass on them;
#   * the row optimizers of every device, and the emulator's, equal TensorFlow's
#     own optimizer computations, of which tests/testing/data keeps values.
#     (tpu_compile.sh makes those values anew and compares them: it needs JAX.)
# Arguments go to pytest for the emulator's tests. The environment that this
# makes, .venv-tpu-kernels, takes 1.5 GB and is kept until its list changes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
source "$ROOT/scripts/_tpu_environments.sh"

export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
ensure_tpu_wheel

cd "$ROOT"
# Several calls: given a folder and a file in it, pytest takes the folder's.
"$PYTHON" -m pytest tests/testing/sparsecore_kernels_check.py
"$PYTHON" -m pytest tests/testing "$@"
"$PYTHON" -m pytest tests/test_row_rules.py
printf "TensorFlow's SparseCore kernels: all passed in %d s\n" "$SECONDS"
