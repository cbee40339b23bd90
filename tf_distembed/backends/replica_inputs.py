"""A replica's dense inputs of unknown size, as its host has them.

On several chips TPUStrategy gives every replica an input of one size: it
fills a short one up with zeros, on the host, and says on the TPU how much of
it is real. XLA then leaves the filling out, but what the TPU has said does not
reach the host. There the filled input has to be cut again, for zeros are ids:

```
chip 0   [[7, 2], [4, 4]]         2 rows are real
chip 1   [[5, 1], [0, 0]]         1 row is real
```
"""

from __future__ import annotations

import tensorflow as tf

# What Keras may do to an input before a layer gets it.
_PASSED_ON = frozenset({"Identity", "Cast", "ExpandDims", "Squeeze"})

# An operation of `tf.compat.v1.tpu.outside_compilation`.
_HOST_MARK = "_xla_outside_compilation"


def is_on_host(tensor: tf.Tensor, num_replicas: int) -> bool:
    """Whether the host has a dense tensor of the replica being traced.

    It has not what the TPU makes of an input whose size only the TPU knows.
    """
    if tensor.shape.is_fully_defined() or num_replicas == 1:
        return True
    if _HOST_MARK in tensor.op.node_def.attr:
        return True
    return bool(_as_given(tensor)[1])


def as_on_host(tensor: tf.Tensor) -> tf.Tensor:
    """A dense tensor of the replica, to be used in its host block."""
    given, sizes, since = _as_given(tensor)
    if not sizes:
        return tensor
    for dimension, size in sizes.items():
        given = given[(slice(None),) * dimension + (slice(size),)]
    for operation in reversed(since):
        given = _again(operation, given)
    return given


def _as_given(
    tensor: tf.Tensor,
) -> tuple[tf.Tensor, dict[int, tf.Tensor], list[tf.Operation]]:
    """The filled input, real size of its dimensions, what was done since."""
    sizes: dict[int, tf.Tensor] = {}
    since: list[tf.Operation] = []
    while True:
        operation = tensor.op
        if operation.type == "XlaSetDynamicDimensionSize":
            tensor, dimension, size = operation.inputs
            sizes[int(tf.get_static_value(dimension))] = size
        elif operation.type in _PASSED_ON:
            since.append(operation)
            tensor = operation.inputs[0]
        else:
            return tensor, sizes, since


def _again(operation: tf.Operation, tensor: tf.Tensor) -> tf.Tensor:
    if operation.type == "Cast":
        return tf.cast(tensor, operation.outputs[0].dtype)
    if operation.type == "ExpandDims":
        axis = tf.get_static_value(operation.inputs[1])
        return tf.expand_dims(tensor, int(axis))
    if operation.type == "Squeeze":
        return tf.squeeze(tensor, operation.get_attr("squeeze_dims"))
    return tensor
