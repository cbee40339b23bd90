"""What a layer of merged cases is fed, replica by replica."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.conformance.cases import Feature, Layer, Use, output_gradient

Batch = dict[str, dict[str, Any]]


def make_batch(layer: Layer, step: int, rows: range) -> Batch:
    """What a replica is fed in a step: the features' rows `rows`.

    Returns:
        feature -> "ids", "weights" (only if it has some; flat values unless
        `weights_apart`) and "gradient", the coefficients of its output in
        the loss.
    """
    batch: Batch = {}
    dims = {table.name: table.dim for table in layer.tables}
    for feature in layer.features:
        uses = [use for use in feature.uses(step) if use.row in rows]
        ids = tf.constant([use.id for use in uses], feature.dtype)
        fed = {"ids": _of_kind(feature, step, rows, uses, ids)}
        if feature.weights is not None:
            weights = tf.constant(
                [use.weight for use in uses], feature.weights_dtype
            )
            if feature.kind == "dense" or feature.weights_apart:
                weights = _of_kind(feature, step, rows, uses, weights)
            fed["weights"] = weights
        gradient = output_gradient(
            feature, step, layer.batches[step], dims[feature.table]
        )
        fed["gradient"] = tf.constant(
            gradient[rows.start : rows.stop], tf.float32
        )
        batch[feature.name] = fed
    return batch


def _of_kind(
    feature: Feature, step: int, rows: range, uses: list[Use], flat: tf.Tensor
) -> Any:
    """One value a use, in the kind of tensor that the feature is fed."""
    if feature.kind == "sparse":
        cells = [(use.row - rows.start, use.column) for use in uses]
        return tf.SparseTensor(
            np.array(cells, np.int64).reshape(-1, 2),
            flat,
            [len(rows), feature.columns],
        )
    if feature.kind == "ragged":
        lengths = [
            len(row) for row in feature.ids[step][rows.start : rows.stop]
        ]
        splits = np.cumsum([0, *lengths]).astype(feature.row_splits_dtype)
        return tf.RaggedTensor.from_row_splits(flat, splits, validate=False)
    if feature.rank == 1:
        return flat
    return tf.reshape(flat, [len(rows), dense_width(feature)])


def dense_width(feature: Feature) -> int:
    """The number of ids of each row, also if there is none."""
    rows = [row for step in feature.ids for row in step]
    if rows:
        return len(rows[0])
    assert feature.input_shape is not None
    return feature.input_shape[1]


def signature_of(layer: Layer, rows: int | None) -> Any:
    """The type of all its batches: one trace serves all steps.

    Args:
        layer: whose batches.
        rows: their number of rows, None if it varies.
    """
    batch = make_batch(layer, 0, range(0))

    def with_rows(feature: Feature, name: str, tensor: Any) -> tf.TypeSpec:
        spec = tf.type_spec_from_value(tensor)
        shape = [rows, *spec.shape[1:]]
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(
                shape, spec.dtype, 1, spec.row_splits_dtype
            )
        if isinstance(spec, tf.SparseTensorSpec):
            return tf.SparseTensorSpec([rows, None], spec.dtype)
        if name == "weights" and feature.kind != "dense":
            shape = [None]
        return tf.TensorSpec(shape, spec.dtype)

    return {
        feature.name: {
            name: with_rows(feature, name, tensor)
            for name, tensor in batch[feature.name].items()
        }
        for feature in layer.features
    }


def fed_shape(feature: Feature) -> tuple[int | None, ...]:
    """The shape of a feature's ids, as `build` takes it."""
    if feature.rank == 1:
        return (None,)
    if feature.kind == "dense":
        return (None, dense_width(feature))
    return (None, None)
