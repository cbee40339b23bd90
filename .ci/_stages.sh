# Sourced by .ci/run and .ci/full: runs one stage after the other, says how long
# each took, and stops with the exit status of the first that fails.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT"
source scripts/_environment.sh
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"

SCRATCH="$(mktemp -d)"
trap 'rm -rf "$SCRATCH"' EXIT

# stage NAME COMMAND...: no stage reads stdin, so none can wait for an answer.
stage() {
    local name="$1" began=$SECONDS status=0
    shift
    printf '\n== %s\n' "$name"
    # A subshell with its own `set -e`: behind `||` bash would ignore it.
    set +e
    (
        set -e
        "$@"
    ) </dev/null
    status=$?
    set -e
    printf '== %s: %d s, exit status %d\n' "$name" $((SECONDS - began)) "$status"
    [ "$status" -eq 0 ] || exit "$status"
}
