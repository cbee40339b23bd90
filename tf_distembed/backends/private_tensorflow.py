"""Every private TensorFlow name that the backends use, and why."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# The layout of a table over SparseCores, as `TableConfig.layout` takes it;
# the public API has the argument and not the type.
from tensorflow.core.tpu.kernels.sparse_core_layout_pb2 import (
    SparseCoreTableLayout,
)

# Whether some gradient tape watches what a tensor was made from.
from tensorflow.python.eager import record

# The public API does not say whether the function being traced will be
# compiled by XLA; TensorFlow's own control flow asks here.
from tensorflow.python.ops import control_flow_util

__all__ = ["SparseCoreTableLayout", "in_xla_context", "is_watched"]


def in_xla_context() -> bool:
    """Whether the graph being traced is inside a function XLA compiles."""
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def is_watched(tensors: list[Any]) -> bool:
    """Whether a tape could ask for the gradient of one of these tensors."""
    return bool(record.should_record_backprop(tensors))
