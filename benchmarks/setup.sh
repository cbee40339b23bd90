#!/usr/bin/env bash
# Makes the environments that `python -m benchmarks` runs its groups in:
#
#   .venv-bench-tf      this package, keras-rs, TensorFlow Recommenders with
#                       tf-keras, matplotlib
#   .venv-bench-torch   this package, torch, FBGEMM; so that both sides of a
#                       ratio are run in one process
#
# and compiles the C floor. Nothing of it goes into the package's own .venv.
# About 3 GB. Torch's wheels with CUDA are larger: where an index has those
# without, name it by PIP_EXTRA_INDEX_URL.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/_environment.sh"

# "$@" into the environment just made, without what they require: that is
# TensorFlow under another name, which would be installed over ours.
add_alone() {
    "$PYTHON" -m pip install --quiet --no-input --no-deps "$@" >&2
}

ensure_environment "$ROOT/.venv-bench-tf" keras-rs==0.4.0 matplotlib==3.10.8
add_alone tensorflow-recommenders==0.7.7 tf-keras==2.21.0

ensure_environment "$ROOT/.venv-bench-torch" torch==2.13.0 \
    fbgemm-gpu-cpu==1.8.0

mkdir -p "$ROOT/benchmarks/build"
"${CC:-gcc}" -O3 -march=native -fopenmp -shared -fPIC \
    -o "$ROOT/benchmarks/build/floor.so" "$ROOT/benchmarks/floor.c" -lm
