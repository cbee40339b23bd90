"""Is there exactly one TensorFlow here, and will Keras use it?

`tensorflow`, `tensorflow-cpu`, `tensorflow-tpu` and the nightly builds install
the same module `tensorflow`. Installers put two of them over each other
without a word; what is left is a mixture of both that may import, may miss
half its attributes, or may abort the process. So the question is answered from
the installed metadata, before anything imports TensorFlow or Keras.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

# Each of these brings its own copy of the module `tensorflow`.
_WHOLE_DISTRIBUTIONS = frozenset(
    {"tensorflow", "tensorflow-cpu", "tensorflow-tpu"}
)
# On Windows and macOS a nightly build requires its own second half; the two
# are one TensorFlow.
_NIGHTLY = re.compile(r"tf-nightly(?!.*-(intel|macos)$)(-.*)?")

# What is installed already is not fetched again: these commands only add the
# TensorFlow that the extra names, in the versions this package works with.
_INSTALL = (
    'pip install "tf_distembed[cpu]" ([gpu] on a GPU, [tpu] on a Cloud TPU)'
)


def _installed_tensorflows() -> dict[str, str]:
    """Versions of the distributions that bring a `tensorflow`, by name."""
    found = {}
    for distribution in importlib.metadata.distributions():
        # A folder without METADATA, left by a broken uninstall, has no name.
        name = distribution.metadata["Name"] if distribution.metadata else None
        if not name:
            continue
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name in _WHOLE_DISTRIBUTIONS or _NIGHTLY.fullmatch(name):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def _tensorflow_is_importable() -> bool:
    if "tensorflow" in sys.modules:
        return True
    spec = importlib.util.find_spec("tensorflow")
    # Uninstalling one of two TensorFlows leaves a folder without __init__.py,
    # which Python takes for an (empty) namespace package.
    return spec is not None and spec.origin is not None


def _check_one_tensorflow() -> None:
    installed = _installed_tensorflows()
    names = " ".join(installed)
    if len(installed) > 1:
        versions = " and ".join(f"{n} {v}" for n, v in installed.items())
        raise ImportError(
            f"tf_distembed needs one TensorFlow, but {versions} are installed "
            "over each other, which leaves a mixture of their files; run: "
            f"pip uninstall -y {names} && {_INSTALL}."
        )
    if _tensorflow_is_importable():
        return
    if installed:
        raise ImportError(
            f"tf_distembed needs TensorFlow, but the files of {names} are "
            "gone (uninstalling a second TensorFlow takes them along); run: "
            f"pip uninstall -y {names} && {_INSTALL}."
        )
    raise ImportError(
        "tf_distembed needs TensorFlow, which is not installed; run: "
        f"{_INSTALL}."
    )


def _configured_keras_backend() -> tuple[str, str] | None:
    """The backend Keras was told to use and who told it, if anyone did."""
    backend = os.environ.get("KERAS_BACKEND")
    if backend:
        return backend, "the environment variable KERAS_BACKEND"
    home = os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras")
    path = Path(home, "keras.json")
    try:
        backend = json.loads(path.read_text(encoding="utf-8"))["backend"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # Keras falls back on TensorFlow just as silently.
    return backend, str(path)


def _check_keras_backend() -> None:
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "config"):
        backend = keras.config.backend()
        if backend != "tensorflow":
            raise ImportError(
                "tf_distembed needs Keras on TensorFlow, but keras was "
                f"imported with the backend {backend!r}; start the process "
                "anew with: export KERAS_BACKEND=tensorflow."
            )
        return
    configured = _configured_keras_backend()
    if configured is not None and configured[0] != "tensorflow":
        backend, source = configured
        raise ImportError(
            f"tf_distembed needs Keras on TensorFlow, but {source} asks for "
            f"the backend {backend!r}; run: export KERAS_BACKEND=tensorflow."
        )


def check_tensorflow() -> None:
    """Refuses to go on without exactly one TensorFlow under Keras.

    Imports neither TensorFlow nor Keras and changes nothing.

    Raises:
        ImportError: No TensorFlow is installed; or more than one of
            `tensorflow`, `tensorflow-cpu`, `tensorflow-tpu` and `tf-nightly*`
            is; or Keras uses, or is configured to use, another backend. The
            message holds the command that mends it. A TensorFlow that can be
            imported but has no metadata (a build from source, a Bazel
            target) is accepted.

    Example:

    >>> check_tensorflow()
    """
    _check_one_tensorflow()
    _check_keras_backend()
