"""The one place that knows what the graph being traced is for."""

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


def has_gpu() -> bool:
    """Whether TensorFlow places operations on a GPU unless told otherwise."""
    return bool(tf.config.list_logical_devices("GPU"))


def infers_shapes() -> bool:
    """Whether Keras traces only to learn shapes, and throws the graph away.

    It does so once before the first step of `fit`, outside any replica.
    """
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return getattr(graph, "name", "").startswith("scratch_graph")
