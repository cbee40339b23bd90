"""The one place that knows whether XLA compiles what is being traced."""

from __future__ import annotations

import tensorflow as tf

from tf_distembed.backends import private_tensorflow


def compiled_by_xla() -> bool:
    """Whether the graph being traced is inside a function XLA compiles.

    So is a replica of a TPU. There, shapes must not depend on values, no
    error can be raised at run time, and `tf.gather` clamps ids out of range
    instead of refusing them.
    """
    if tf.executing_eagerly():
        return False
    return private_tensorflow.in_xla_context()
