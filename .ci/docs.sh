#!/usr/bin/env bash
# Builds the pages of docs/ and the reference from the docstrings into site/:
#     bash .ci/docs.sh            # a warning, such as a dead link, is an error
#     bash .ci/docs.sh serve      # shows them on this machine while you write
# The first call makes .venv-docs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/_environment.sh"

# Versions that the pages are known to build with, and their corrections.
ensure_environment "$ROOT/.venv-docs" \
    "mkdocs>=1.6,<2" "mkdocs-material>=9.6,<10" "mkdocstrings[python]>=0.29,<2"
cd "$ROOT"
# A notice of the theme's makers, which is no warning about these pages.
export NO_MKDOCS_2_WARNING=1
[ $# -gt 0 ] || set -- build --strict
exec "$PYTHON" -m mkdocs "$@"
