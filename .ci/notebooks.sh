#!/usr/bin/env bash
# Runs notebooks of colabs/ from top to bottom, each in a kernel of its own:
#     bash .ci/notebooks.sh                         # all
#     bash .ci/notebooks.sh custom_training_loop    # one
# A cell that raises fails the run, and so does a notebook that takes more than
# the five minutes it may. Needs the network only to make .venv-notebooks and
# where MovieLens-100K is not in the cache yet.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/_environment.sh"

ensure_environment "$ROOT/.venv-notebooks" \
    "nbmake>=1.5" "ipykernel>=6" "jupytext>=1.16" "matplotlib>=3.8" \
    "keras-rs==0.4.0"
LIMIT=300
cd "$ROOT"
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
# No window, and no history of the user's own kernels.
export MPLBACKEND=agg IPYTHONDIR
IPYTHONDIR="$(mktemp -d)"
trap 'rm -rf "$IPYTHONDIR"' EXIT

# jupytext reads each .py as the cells that its .ipynb has.
"$PYTHON" - <<'PYTHON_END'
from pathlib import Path

import jupytext


def cells(path):
    notebook = jupytext.read(path)
    return [
        (c.cell_type, c.source, c.metadata.get("tags", []))
        for c in notebook.cells
    ]


scripts = sorted(Path("colabs").glob("*.ipynb"))
assert scripts, "there is no notebook in colabs/"
for notebook in scripts:
    assert cells(notebook) == cells(notebook.with_suffix(".py")), notebook
PYTHON_END

if [ $# -eq 0 ]; then
    set -- colabs/*.ipynb
    set -- "${@#colabs/}"
    set -- "${@%.ipynb}"
fi
# The kernel python3 is the one that the environment brings.
PATH="$ROOT/.venv-notebooks/bin:$PATH"
for name in "$@"; do
    status=0
    # nbmake limits each cell, and this the whole.
    timeout "$LIMIT" "$PYTHON" -m pytest -p no:cacheprovider --nbmake \
        --nbmake-timeout="$LIMIT" --durations=1 "colabs/$name.ipynb" ||
        status=$?
    [ "$status" -ne 124 ] || _say "colabs/$name took more than $LIMIT s."
    [ "$status" -eq 0 ] || exit "$status"
done
