"""The one place that knows whether XLA compiles what is being traced."""

from __future__ import annotations

import tensorflow as tf

# TensorFlow's public API does not say whether the function being traced will
# be compiled; its own control flow asks here.
from tensorflow.python.ops import control_flow_util


def compiled_by_xla() -> bool:
    """Whether the graph being traced is inside a function XLA compiles.

    There, shapes must not depend on values, no error can be raised at run
    time, and `tf.gather` clamps ids out of range instead of refusing them.
    """
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))
