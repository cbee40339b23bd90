#!/usr/bin/env bash
# Reads BUILD with Bazel, compares its sources with the committed files, and
# runs the tests named as arguments (default: tests/test_tensorflow_guard).
#
# For Debian's Bazel, which fetches nothing:
#     apt-get install --no-install-recommends bazel-bootstrap \
#         bazel-rules-java bazel-rules-proto bazel-skylib bazel-platforms
# It is older than the rules that MODULE.bazel asks for, so the names that BUILD
# loads are set up here: the Python rules are Bazel's own, and packages come
# from .venv. What this cannot see: a mistake in MODULE.bazel or in the lock.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/_environment.sh"

command -v bazel >/dev/null || {
    _say "Bazel is missing; the head of .ci/bazel.sh says what to install."
    exit 1
}
ensure_environment "$ROOT/.venv"
cd "$ROOT"

SCRATCH="$(mktemp -d)"
bazel_() {
    (cd "$SCRATCH/tree" && PATH="$ROOT/.venv/bin:$PATH" \
        bazel --output_user_root="$SCRATCH/out" "$@")
}
clean_up() {
    bazel_ shutdown >/dev/null 2>&1 || true
    chmod -R u+w "$SCRATCH"
    rm -rf "$SCRATCH"
}
trap clean_up EXIT

# A repository called $1 with the files that follow: name, text, name, text...
repository() {
    local folder="$SCRATCH/$1"
    mkdir -p "$folder/cc" "$folder/python"
    touch "$folder/WORKSPACE" "$folder/BUILD" "$folder/cc/BUILD" \
        "$folder/python/BUILD"
    shift
    while [ $# -gt 0 ]; do
        printf '%s\n' "$2" >"$folder/$1"
        shift 2
    done
}

repository rules_python python/defs.bzl \
    'py_library = native.py_library
py_test = native.py_test'
repository rules_cc cc/defs.bzl "$(
    for rule in binary import library proto_library test toolchain \
        toolchain_suite; do
        echo "cc_$rule = native.cc_$rule"
    done
    printf '%s = native.%s\n' fdo_prefetch_hints{,} fdo_profile{,} \
        objc_import{,} objc_library{,}
    printf '%s = None\n' cc_flags_supplier cc_toolchain_alias compiler_flag
)"
repository remote_coverage_tools BUILD \
    'package(default_visibility = ["//visibility:public"])
filegroup(name = "coverage_report_generator")
filegroup(name = "lcov_merger")'
repository pypi BUILD \
    "package(default_visibility = [\"//visibility:public\"])
$(sed -n 's/^\([a-z0-9-]*\)==.*/py_library(name = "\1")/p' \
        requirements_lock.txt)" \
    requirements.bzl \
    'def requirement(name):
    return "@pypi//:" + name'

mkdir "$SCRATCH/tree"
git archive HEAD | tar -x -C "$SCRATCH/tree"
touch "$SCRATCH/tree/WORKSPACE"
{
    for name in rules_python rules_cc remote_coverage_tools pypi; do
        echo "common --override_repository=$name=$SCRATCH/$name"
    done
    echo "common --override_repository=rules_java=/usr/share/bazel/rules/java"
    echo "common --override_repository=rules_proto=/usr/share/bazel/rules/proto"
    echo "common --override_repository=bazel_skylib=/usr/share/bazel/tools/skylib"
    echo "common --override_repository=platforms=/usr/share/bazel/platforms"
    echo "test --test_env=PATH --test_output=errors"
} >"$SCRATCH/tree/.bazelrc"

bazel_ query --noshow_progress 'labels(srcs, //...)' |
    sed -n 's,^//:,,p' | grep '\.py$' | sort -u >"$SCRATCH/in_build"
git ls-files 'benchmarks/*.py' 'tests/*.py' 'tf_distembed/*.py' |
    sort >"$SCRATCH/in_git"
# setup.py and scripts are data of some tests, not sources of a library.
diff <(grep -E '^(benchmarks|tests|tf_distembed)/' "$SCRATCH/in_build") \
    "$SCRATCH/in_git" || {
    _say "BUILD (<) and the committed files (>) differ."
    exit 1
}
_say "BUILD names all $(wc -l <"$SCRATCH/in_git") committed sources."

[ $# -gt 0 ] || set -- tests/test_tensorflow_guard
bazel_ test --noshow_progress "${@/#///:}"
