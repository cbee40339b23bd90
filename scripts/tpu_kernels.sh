#!/usr/bin/env bash
# Tests SparseCore code against TensorFlow's own host kernels, which only the
# wheel for TPUs has; no TPU is needed, nor looked for:
#   * the kernels that the emulator does in NumPy equal them, bit for bit;
#   * the emulator's tests pass on them.
# Arguments go to pytest for the latter. The environment that this makes,
# .venv-tpu-kernels, takes 1.5 GB and is kept until the list below changes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

PINS=(
    tensorflow-tpu==2.20.0
    keras==3.15.1
    numpy==2.4.6
    protobuf==7.36.2
    ml_dtypes==0.6.0
    h5py==3.16.0
    hypothesis==6.170.17
    pytest==9.2.0
)
ENVIRONMENT="$ROOT/.venv-tpu-kernels"
PYTHON="$ENVIRONMENT/bin/python"
# TensorFlow would load a TPU's library, and wait for the TPU.
export TPU_LOAD_LIBRARY=0
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"

pip_install() {
    # No conflicts: it would say that libtpu is missing.
    "$PYTHON" -m pip install --quiet --quiet --no-input --no-warn-conflicts \
        "$@" </dev/null >&2
}

make_environment() {
    local base needed
    base="$(_find_python)"
    _say "making $ENVIRONMENT with $("$base" --version 2>&1)"
    "$base" -m venv --clear "$ENVIRONMENT" </dev/null >&2
    # All that the wheel asks for but libtpu, half a gigabyte that only a TPU
    # can use.
    pip_install --no-deps "${PINS[0]}"
    needed="$("$PYTHON" -c '
from importlib.metadata import requires
for requirement in requires("tensorflow-tpu"):
    name, _, marker = requirement.partition(";")
    if not name.startswith("libtpu") and "extra" not in marker:
        print(requirement)
')"
    printf '%s\n' "$needed" >"$ENVIRONMENT/requirements.txt"
    pip_install -r "$ENVIRONMENT/requirements.txt" "${PINS[@]:1}"
}

wanted="$(printf '%s\n' "$ROOT" "${PINS[@]}" | cksum)"
_lock "$ENVIRONMENT"
if [ "$(cat "$ENVIRONMENT/.made-from" 2>/dev/null)" != "$wanted" ]; then
    make_environment
    printf '%s\n' "$wanted" >"$ENVIRONMENT/.made-from"
    _say "the environment took $SECONDS s"
fi
_unlock

cd "$ROOT"
# Two calls: given a folder and a file in it, pytest takes the folder's tests.
"$PYTHON" -m pytest tests/testing/sparsecore_kernels_check.py
"$PYTHON" -m pytest tests/testing "$@"
printf "TensorFlow's SparseCore kernels: all passed in %d s\n" "$SECONDS"
