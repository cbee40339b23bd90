"""What XLA does with an index out of range, which a CPU kernel refuses.

A gather clamps it to the nearest row; a scatter drops the row. Code that a
TPU runs may rely on the second and must not be hurt by the first.
"""

from collections.abc import Sequence

import tensorflow as tf

_SCATTERS = (
    "ResourceScatterAdd",
    "ResourceScatterMax",
    "ResourceScatterMin",
    "ResourceScatterSub",
    "ResourceScatterUpdate",
)


def as_on_a_tpu(
    operation: tf.Operation, inputs: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor]:
    """The inputs with which a CPU kernel gives what XLA gives.

    Args:
        operation: An operation of a replica's trace.
        inputs: Its inputs on one chip.
    """
    kind = operation.type
    if kind == "GatherV2":
        table, ids, axis = inputs
        return table, _clamp(ids, tf.shape(table)[axis]), axis
    if kind == "ResourceGather":
        table, ids = inputs
        return table, _clamp(ids, _rows(table))
    if kind in _SCATTERS:
        table, ids, updates = inputs
        inside = (ids >= 0) & (ids < tf.cast(_rows(table), ids.dtype))
        return (
            table,
            tf.boolean_mask(ids, inside),
            tf.boolean_mask(updates, inside),
        )
    return inputs


def _rows(table: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.VariableShape(input=table)[0]


def _clamp(ids: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    return tf.clip_by_value(ids, 0, tf.cast(size, ids.dtype) - 1)
