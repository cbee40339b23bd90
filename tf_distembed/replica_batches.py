"""A replica's part of a batch: its rows, and short parts filled up for a TPU.

`tf.distribute` gives every replica its rows of a global batch. The last batch
may leave some with fewer rows, or none. A CPU or GPU takes them as they are; a
TPU takes one number of rows, so there empty rows are added on the host and a
mask says which rows are real.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def is_iterator(data: Any) -> bool:
    """Whether it yields batches to a tf.function."""
    return isinstance(
        data, (tf.data.Iterator, tf.distribute.DistributedIterator)
    )


def split(strategy: tf.distribute.Strategy, batch: Any) -> tuple[Any, ...]:
    """The parts of the replicas of this process, in their order.

    Raises:
        ValueError: the batch is not distributed, though there are replicas to
            distribute it over.
    """
    replicas = 1
    if strategy.num_replicas_in_sync > 1:
        replicas = len(strategy.extended.worker_devices)
    leaves = [
        strategy.experimental_local_results(leaf)
        for leaf in tf.nest.flatten(batch)
    ]
    if replicas > 1 and all(len(parts) == 1 for parts in leaves):
        raise ValueError(
            f"The batch has no parts for the {replicas} replicas of the "
            f"{type(strategy).__name__}. Take batches from "
            "tde.distribute_dataset(dataset, strategy)."
        )
    return tuple(
        tf.nest.pack_sequence_as(
            batch, [parts[i if len(parts) > 1 else 0] for parts in leaves]
        )
        for i in range(replicas)
    )


def join(strategy: tf.distribute.Strategy, parts: Sequence[Any]) -> Any:
    """The value of all replicas; the inverse of `split`."""
    if len(parts) == 1 and strategy.num_replicas_in_sync == 1:
        return parts[0]
    order = iter(parts)
    return strategy.experimental_distribute_values_from_function(
        lambda _: next(order)
    )


def rows_of(value: Any) -> tf.Tensor:
    """Number of examples of a dense, ragged or sparse tensor; int32."""
    if isinstance(value, tf.RaggedTensor):
        rows = value.nrows()
    elif isinstance(value, tf.SparseTensor):
        rows = value.dense_shape[0]
    else:
        rows = tf.shape(value)[0]
    return tf.cast(rows, tf.int32)


def first_input(data: Any) -> Any:
    """A tensor of the inputs; it has a row for each example."""
    inputs, _, _ = unpack(data)
    return next(one for one in tf.nest.flatten(inputs) if one is not None)


def unpack(data: Any) -> tuple[Any, Any, Any]:
    """(x, y, sample_weight) of an element, as Keras reads it."""
    return keras.utils.unpack_x_y_sample_weight(data)


def leaves_of(data: Any) -> list[Any]:
    """The tensors of a batch, or their specifications; None where it has none.

    Args:
        data: A batch, or the `element_spec` of an iterator, which for several
            replicas has specifications of what each of them gets.
    """
    leaves = [
        one
        for leaf in tf.nest.flatten(data)
        for one in getattr(leaf, "_value_specs", (leaf,))
    ]
    # What stands for None in a specification is no tensor's.
    return [leaf if hasattr(leaf, "shape") else None for leaf in leaves]


def has_static_rows(data: Any) -> bool:
    """Whether every tensor (or its specification) has a known first size."""
    shapes = [leaf.shape for leaf in leaves_of(data) if leaf is not None]
    return all(shape.rank and shape[0] is not None for shape in shapes)


def fill_up(part: Any, rows: int, *, pad: bool) -> tuple[Any, tf.Tensor]:
    """A replica's part with `rows` rows, and a mask `[rows]` of the real ones.

    Args:
        part: Tensors of one number of rows.
        rows: The rows that they get.
        pad: Whether fewer rows are filled up; if not, they raise.

    Raises:
        tf.errors.InvalidArgumentError: when run, too many rows, or too few.
    """
    found = rows_of(first_input(part))
    check = tf.debugging.assert_less_equal if pad else tf.debugging.assert_equal
    advice = (
        "Pass batch_size= to tde.distribute_dataset."
        if pad
        else "Use pad_last_batch=True, or drop_remainder=True."
    )
    with tf.control_dependencies(
        [
            check(
                found,
                rows,
                f"A replica's batch on a TPU has {rows} rows, and this one "
                f"has another number. {advice}",
            )
        ]
    ):
        found = tf.identity(found)
    filled = tf.nest.map_structure(
        lambda one: None if one is None else _fill_up(one, found, rows), part
    )
    return filled, tf.cast(tf.range(rows) < found, tf.float32)


def _fill_up(value: Any, found: tf.Tensor, rows: int) -> Any:
    missing = rows - found
    if isinstance(value, tf.RaggedTensor):
        splits = value.row_splits
        splits = tf.concat([splits, tf.repeat(splits[-1:], missing)], 0)
        splits = tf.ensure_shape(splits, [rows + 1])
        return tf.RaggedTensor.from_row_splits(
            value.values, splits, validate=False
        )
    if isinstance(value, tf.SparseTensor):
        shape = tf.unstack(value.dense_shape, num=value.shape.rank)
        return tf.SparseTensor(
            value.indices,
            value.values,
            tf.stack([tf.constant(rows, tf.int64), *shape[1:]]),
        )
    padding = [[0, missing]] + [[0, 0]] * (value.shape.rank - 1)
    return tf.ensure_shape(tf.pad(value, padding), [rows, *value.shape[1:]])


def relaxed_specs(parts: Any) -> Any:
    """Specifications of tensors that also admit any other number of rows."""
    return tf.nest.map_structure(_relaxed, parts)


def _relaxed(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, tf.RaggedTensor):
        inner = value.flat_values.shape[1:]
        shape = [None] * (value.ragged_rank + 1) + list(inner)
        return tf.RaggedTensorSpec(
            shape, value.dtype, value.ragged_rank, value.row_splits.dtype
        )
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec([None] * value.shape.rank, value.dtype)
    value = tf.convert_to_tensor(value)
    return tf.TensorSpec([None, *value.shape[1:]], value.dtype)
