"""Functions that TensorFlow runs as they were traced.

Its graph optimizer takes as long as all else for what an emulated chip runs a
few times, and is no part of what a TPU would do with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

_OPTION = "disable_meta_optimizer"


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Leaves the graph optimizer out while entered."""
    options = tf.config.optimizer
    before = options.get_experimental_options().get(_OPTION, False)
    options.set_experimental_options({_OPTION: True})
    try:
        yield
    finally:
        options.set_experimental_options({_OPTION: before})
