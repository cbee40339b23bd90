#!/usr/bin/env bash
# Trains a recommender on MovieLens-100K, saves it and evaluates it again in a
# new process. The last line of stdout is JSON. Arguments go to the command:
#     bash scripts/demo.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

ensure_environment "$ROOT/.venv"
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
# Stays in the caller's directory: paths among the arguments are the caller's.
exec "$PYTHON" -m tf_distembed train "$@"
