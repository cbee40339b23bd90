#!/usr/bin/env bash
# Checks the code and runs the fast tests; arguments go to pytest:
#     bash scripts/test.sh -k ragged
#     bash scripts/test.sh -m slow
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

ensure_environment "$ROOT/.venv"
cd "$ROOT"
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
# Two processes, a file in one of them: each imports TensorFlow anew.
"$PYTHON" -m pytest -n 2 --dist loadfile -m "not slow" "$@"
