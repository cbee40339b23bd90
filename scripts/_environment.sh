# Sourced by the other scripts. Defines ROOT (the checkout) and the function
# ensure_environment, which sets PYTHON to the interpreter to run.
#
# Everything said here goes to stderr: stdout belongs to the command that the
# environment was made for.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

_say() { printf 'tf_distembed: %s\n' "$*" >&2; }

# Is "$1" a Python for which there are wheels of TensorFlow?
_has_right_version() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
        </dev/null >/dev/null 2>&1
}

_can_make_environments() {
    "$1" -c 'import ensurepip, venv' </dev/null >/dev/null 2>&1
}

_find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3 python \
        /usr/bin/python3; do
        if _has_right_version "$candidate" &&
            _can_make_environments "$candidate"; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    _say "no Python 3.11, 3.12 or 3.13 with the modules venv and ensurepip" \
        "was found; install one (on Debian and Ubuntu:" \
        "apt install python3.11 python3.11-venv) and call this again."
    return 1
}

# What the environment was made from. Another path breaks an environment, as
# its commands and the editable install hold absolute paths.
_fingerprint() {
    printf 'checkout %s\nrequirements %s\n' "$ROOT" "$*"
    cksum <"$ROOT/setup.py"
    cksum <"$ROOT/requirements.txt"
}

# A TensorFlow that its owner put there, for a GPU or a TPU, stays the only one.
# (Where the extra cpu is not tensorflow-cpu, it cannot clash with it.)
_extras_for() {
    "$1" -c '
import platform, sys
from importlib.metadata import distributions
found = {str(d.metadata["Name"]).replace("_", "-") for d in distributions()}
there = found & {"tensorflow", "tensorflow-tpu", "tf-nightly"}
is_cpu_a_clash = (sys.platform, platform.machine()) == ("linux", "x86_64")
print("test" if there and is_cpu_a_clash else "cpu,test")
' </dev/null
}

# Two callers at once would install over each other.
_lock() {
    if command -v flock >/dev/null; then
        exec 9>"$1.lock" && flock 9
    fi
}

_unlock() { exec 9>&-; }

_make_environment() {
    local directory="$1" python base
    shift
    python="$directory/bin/python"
    if [ -x "$python" ] && "$python" -c '' </dev/null 2>/dev/null; then
        if ! _has_right_version "$python"; then
            _say "$directory was made with $("$python" --version 2>&1), but" \
                "Python 3.11, 3.12 or 3.13 is needed; remove that directory."
            return 1
        fi
    else
        base="$(_find_python)" || return 1
        _say "making $directory with $("$base" --version 2>&1)"
        "$base" -m venv --clear "$directory" </dev/null >&2 || return 1
    fi
    "$python" -m pip --version </dev/null >/dev/null 2>&1 ||
        "$python" -m ensurepip </dev/null >&2 || return 1
    _say "installing into $directory (about a minute and 1.6 GB when new)"
    # Twice quiet: errors only.
    "$python" -m pip install --quiet --quiet --no-input \
        -e "$ROOT[$(_extras_for "$python")]" "$@" </dev/null >&2 || {
        _say "the installation failed; with a package index in reach, call" \
            "this again."
        return 1
    }
}

# ensure_environment DIRECTORY [REQUIREMENT...]: makes DIRECTORY an environment
# with this checkout, its tests' needs and the REQUIREMENTs, or reuses it
# without touching the network when nothing has changed since.
ensure_environment() {
    local directory="$1" stamp wanted status=0
    shift
    stamp="$directory/.made-from"
    PYTHON="$directory/bin/python"
    _lock "$directory"
    wanted="$(_fingerprint "$@")"
    if ! { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] &&
        "$PYTHON" -c '' </dev/null 2>/dev/null; }; then
        rm -f "$stamp"
        _make_environment "$directory" "$@" &&
            printf '%s\n' "$wanted" >"$stamp" || status=$?
    fi
    _unlock
    return "$status"
}
