"""What a user may feed: kinds, dtypes, ranks, shapes.

What the Python types, dtypes and static shapes of ids and weights tell is
checked here, while a function is traced and also for Keras tensors. What only
the values tell is in `value_checks`.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_distembed.features import Feature

DENSE, RAGGED, SPARSE = "dense", "ragged", "sparse"


def kind_of(value: Any) -> str:
    """`"dense"`, `"ragged"` or `"sparse"`, of a tensor or a Keras tensor."""
    if isinstance(value, tf.RaggedTensor) or getattr(value, "ragged", False):
        return RAGGED
    if isinstance(value, tf.SparseTensor) or getattr(value, "sparse", False):
        return SPARSE
    return DENSE


def as_tensor(feature: Feature, value: Any, what: str = "ids") -> Any:
    """A tensor of what may be a list, a NumPy array or a tensor.

    Lists and object arrays of unequal rows become ragged tensors.

    Raises:
        TypeError: neither of these.
    """
    if isinstance(
        value,
        (tf.Tensor, tf.RaggedTensor, tf.SparseTensor, keras.KerasTensor),
    ):
        return value
    if isinstance(value, (tf.Variable, keras.Variable)):
        return tf.convert_to_tensor(value)
    if value is None or isinstance(value, (dict, str, bytes)):
        raise TypeError(
            f"{feature.where}: {what} must be a tensor, array or list of "
            f"integers. Received: {value!r} (of type {type(value).__name__})"
        )
    if isinstance(value, np.ndarray) and value.dtype != object:
        return tf.convert_to_tensor(value)
    return _from_rows(feature, value, what)


def _from_rows(feature: Feature, value: Any, what: str) -> Any:
    try:
        rows = [
            row if np.isscalar(row) or np.ndim(row) == 0 else list(row)
            for row in value
        ]
        if not rows:
            return tf.zeros([0], tf.int64 if what == "ids" else tf.float32)
        if not any(isinstance(row, list) for row in rows):
            return tf.convert_to_tensor(np.asarray(rows))
        lengths = [len(row) for row in rows]
        flat = np.asarray([item for row in rows for item in row])
        if not flat.size:
            flat = flat.astype(np.int64 if what == "ids" else np.float32)
        if flat.dtype == object or flat.ndim != 1:
            raise ValueError("rows must hold numbers")
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{feature.where}: {what} must be a list of integers or a list of "
            f"lists of integers. Received: {value!r} ({error})"
        ) from error
    if len(set(lengths)) == 1:
        return tf.convert_to_tensor(flat.reshape([len(rows), lengths[0]]))
    return tf.RaggedTensor.from_row_lengths(flat, lengths)


def check_feature(feature: Feature, ids: Any, weights: Any = None) -> None:
    """Checks all that types, dtypes and static shapes tell of a feature.

    Args:
        feature: The feature being fed.
        ids: A tensor of any kind, or a Keras tensor.
        weights: Likewise, or None.

    Raises:
        TypeError: a dtype that ids or weights cannot have.
        ValueError: a rank, kind or width that contradicts the declaration, or
            weights that do not lie beside the ids.
    """
    _check_id_dtype(feature, ids)
    shape = static_shape(feature, ids, "ids")
    rank = len(shape)
    kind = kind_of(ids)
    if rank not in (1, 2) or (kind == RAGGED and rank != 2):
        raise ValueError(
            f"{feature.where}: ids must have rank 1 or 2 (rank 2, ragged in "
            f"dimension 1, if ragged). Received: {kind} ids of shape {shape}"
        )
    _check_declared(feature, kind, shape)
    if weights is not None:
        _check_weights(feature, ids, weights)


def _check_id_dtype(feature: Feature, ids: Any) -> None:
    dtype = tf.as_dtype(ids.dtype)
    if dtype.is_integer and not dtype.is_quantized:
        return
    cure = "Cast the ids to int32 or int64."
    if dtype.is_floating:
        cure = (
            "If Keras made this input float32: use "
            "keras.Input(..., dtype='int64'), also as the first layer of a "
            "Sequential model. Else cast the ids to int32 or int64."
        )
    elif dtype == tf.string:
        cure = "Map strings to ids first (keras.layers.StringLookup)."
    raise TypeError(
        f"{feature.where}: ids must have an integer dtype. "
        f"Received: dtype={dtype.name}. {cure}"
    )


def _check_declared(
    feature: Feature, kind: str, shape: tuple[int | None, ...]
) -> None:
    declared = feature.input_shape
    if declared is None:
        return
    width = shape[1] if len(shape) == 2 else 1
    if len(declared) == 1:
        # Dense [B, 1] is the same as [B]; any other second dimension is not.
        if len(shape) == 2 and (kind != DENSE or width not in (1, None)):
            raise ValueError(
                f"{feature.where}: input_shape={declared} declares one id an "
                f"example (rank 1). Received: {kind} ids of shape {shape}. "
                "Declare (batch, width) for several ids an example."
            )
    elif (
        kind == DENSE
        and None not in (declared[1], width)
        and width != declared[1]
    ):
        raise ValueError(
            f"{feature.where}: input_shape={declared} declares {declared[1]} "
            f"ids an example. Received: dense ids of shape {shape}"
        )


def _check_weights(feature: Feature, ids: Any, weights: Any) -> None:
    dtype = tf.as_dtype(weights.dtype)
    if not (dtype.is_floating or dtype.is_integer):
        raise TypeError(
            f"{feature.where}: weights must have a float or integer dtype. "
            f"Received: dtype={dtype.name}"
        )
    shapes = (
        static_shape(feature, ids, "ids"),
        static_shape(feature, weights, "weights"),
    )
    kinds = kind_of(ids), kind_of(weights)
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{feature.where}: weights must be of the same kind as the ids, "
            f"one weight an id. Received: {kinds[0]} ids of shape {shapes[0]} "
            f"and {kinds[1]} weights of shape {shapes[1]}"
        )
    if len(shapes[0]) != len(shapes[1]):
        # [B] and [B, 1] are the same; weights per example of 2-D ids are not.
        ranks = {len(shape) for shape in shapes}
        longer = max(shapes, key=len)
        if kinds[0] != DENSE or ranks != {1, 2} or longer[1] != 1:
            _raise_weight_shape(feature, *shapes)
    for size, weight_size in zip(*shapes, strict=False):
        if None not in (size, weight_size) and size != weight_size:
            _raise_weight_shape(feature, *shapes)


def _raise_weight_shape(feature: Feature, ids: Any, weights: Any) -> None:
    raise ValueError(
        f"{feature.where}: weights must have the shape of the ids, one weight "
        f"an id. Received: ids of shape {ids} and weights of shape {weights}"
    )


def static_shape(
    feature: Feature, value: Any, what: str
) -> tuple[int | None, ...]:
    """The shape of ids or weights, None for sizes not known in a trace.

    Raises:
        ValueError: not even the rank is known.
    """
    shape = value.shape
    if isinstance(shape, tf.TensorShape):
        if shape.rank is None:
            raise ValueError(
                f"{feature.where}: {what} must have a rank that is known when "
                f"a function is traced. Received: {value!r}. Give the function "
                "an input_signature, or use tf.ensure_shape."
            )
        return tuple(shape.as_list())
    return tuple(shape)
