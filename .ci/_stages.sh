# Sourced by .ci/run and .ci/full: runs one stage after the other, also when one
# has failed, and says at the end how long each took and which of them failed.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT"
source scripts/_environment.sh
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"

SCRATCH="$(mktemp -d)"
trap 'rm -rf "$SCRATCH"' EXIT

STAGES=()
FAILED=()

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
    STAGES+=("$name: $((SECONDS - began)) s, exit status $status")
    printf '== %s\n' "${STAGES[-1]}"
    [ "$status" -eq 0 ] || FAILED+=("$name")
}

# The last line of a script with stages: fails if one of them has.
finish() {
    printf '\n== %d stages took %d s\n' "${#STAGES[@]}" "$SECONDS"
    printf '%s\n' "${STAGES[@]}"
    if [ "${#FAILED[@]}" -gt 0 ]; then
        printf 'FAILED: %s\n' "${FAILED[@]}"
        exit 1
    fi
    printf 'all stages passed\n'
}
