# Sourced after _environment.sh by the scripts that check code for TPUs. Its
# two functions make environments, each in a directory of its own, that are kept
# until their list of packages changes; each sets PYTHON. They are two because
# TensorFlow and JAX must not share one.

# TensorFlow's wheel for TPUs, which runs on a CPU.
TPU_WHEEL_PINS=(
    tensorflow-tpu==2.20.0
    keras==3.15.1
    numpy==2.4.6
    protobuf==7.36.2
    ml_dtypes==0.6.0
    h5py==3.16.0
    hypothesis==6.170.17
    pytest==9.2.0
)
# The TPU's compiler, and JAX to call it: what jax[tpu] stands for.
TPU_COMPILER_PINS=(
    jax==0.10.2
    jaxlib==0.10.2
    libtpu==0.0.42.1
    ml_dtypes==0.6.0
    numpy==2.4.6
    opt_einsum==3.4.0
    scipy==1.17.1
)

_pip_install() {
    # No conflicts: it would say that tensorflow-tpu lacks libtpu.
    "$PYTHON" -m pip install --quiet --quiet --no-input --no-warn-conflicts \
        "$@" </dev/null >&2
}

_install_tpu_wheel() {
    local needed
    # All that the wheel asks for but libtpu, half a gigabyte that only a TPU
    # can use.
    _pip_install --no-deps "$1" || return 1
    needed="$("$PYTHON" -c '
from importlib.metadata import requires
for requirement in requires("tensorflow-tpu"):
    name, _, marker = requirement.partition(";")
    if not name.startswith("libtpu") and "extra" not in marker:
        print(requirement)
')" || return 1
    printf '%s\n' "$needed" >"${PYTHON%/bin/python}/requirements.txt"
    _pip_install -r "${PYTHON%/bin/python}/requirements.txt" "${@:2}"
}

_install_tpu_compiler() {
    _pip_install --no-deps "$@"
}

# _ensure_pinned DIRECTORY INSTALLER PIN...
_ensure_pinned() {
    local directory="$1" installer="$2" base wanted began=$SECONDS
    shift 2
    PYTHON="$directory/bin/python"
    wanted="$(printf '%s\n' "$ROOT" "$@" | cksum)"
    _lock "$directory"
    if [ "$(cat "$directory/.made-from" 2>/dev/null)" != "$wanted" ]; then
        base="$(_find_python)" || return 1
        _say "making $directory with $("$base" --version 2>&1)"
        "$base" -m venv --clear "$directory" </dev/null >&2 || return 1
        "$installer" "$@" || return 1
        printf '%s\n' "$wanted" >"$directory/.made-from"
        _say "the environment took $((SECONDS - began)) s"
    fi
    _unlock
}

ensure_tpu_wheel() {
    # TensorFlow would load a TPU's library, and wait for the TPU.
    export TPU_LOAD_LIBRARY=0
    _ensure_pinned "$ROOT/.venv-tpu-kernels" _install_tpu_wheel \
        "${TPU_WHEEL_PINS[@]}"
}

ensure_tpu_compiler() {
    _ensure_pinned "$ROOT/.venv-tpu-compile" _install_tpu_compiler \
        "${TPU_COMPILER_PINS[@]}"
}
