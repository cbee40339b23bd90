"""From ids and weights of any kind to one canonical form, `Bags`.

A batch of three examples, whose second one is empty, is the same bags in each
of the kinds it can come in:

```
ragged [[7, 7], [], [3]]      ids  7 7 3
                              bag  0 0 2      num_bags 3
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_distembed import real_rows
from tf_distembed.backends import compilation
from tf_distembed.features import Feature
from tf_distembed.inputs import DENSE, kind_of
from tf_distembed.value_checks import Checks


@dataclasses.dataclass(frozen=True)
class Bags:
    """The ids of one feature in one batch, flat and in order of their bags.

    A bag is what one output vector is made of: an example, or, for a feature
    whose ids are not combined, one position of an example.

    Attributes:
        ids: `[N]` int32 or int64, each within the table (or masked).
        bag: `[N]` int32, ascending: the bag of each id.
        num_bags: Number of bags, an int or a scalar int32 tensor.
        weights: `[N]` float32, or None for weights of 1.
        present: `[N]` bool in the form for XLA, where nothing can be removed:
            False for an id that was dropped or cut, or is padding. Else None.
        one_each: Every bag holds exactly one id, and no weight.
        leading_shape: Shape of the output before its last dimension, a
            sequence of ints and scalar tensors.
        dropped: Scalar int64, how many ids were dropped, or None.
        lengths: `[num_bags]`, how many ids each bag holds, or None where that
            is not known without counting.
    """

    ids: tf.Tensor
    bag: tf.Tensor
    num_bags: Any
    weights: tf.Tensor | None
    present: tf.Tensor | None
    one_each: bool
    leading_shape: Sequence[Any]
    dropped: tf.Tensor | None
    lengths: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class _Flat:
    """A batch before the rules on values: ids as they came, bags = examples."""

    ids: tf.Tensor
    bag: tf.Tensor
    num_rows: Any
    width: int | None
    weights: tf.Tensor | None
    lengths: tf.Tensor | None = None


def to_bags(
    feature: Feature,
    ids: Any,
    weights: Any,
    *,
    compiled: bool,
    checks: Checks,
) -> Bags:
    """The canonical form of one feature's batch.

    The rules apply in this order: the range of the ids (dropped or reported),
    then the cut to the declared width, then, for a feature that is not
    combined, one bag a position.

    Args:
        feature: The feature being fed.
        ids: Tensor of any kind, already past `check_feature`.
        weights: The same, or None.
        compiled: Whether XLA compiles this; then ids are masked, not removed.
        checks: Collects what must be checked when the function runs.
    """
    flat = _flatten(feature, ids, weights, compiled, checks)
    flat = _gated(flat, checks.run_early())
    real = real_rows.mask() if kind_of(ids) == DENSE else None
    if real is not None:
        real = tf.gather(real, flat.bag)
    found = _OutOfRange(feature, flat.ids, real)
    present = real
    dropped = None
    if compiled or feature.drops_invalid_ids:
        bad = found.each()
        good = tf.logical_not(bad)
        present = good if present is None else present & good
        dropped = tf.math.count_nonzero(bad)
    else:
        checks.add_range_check(feature, flat.ids, found.any(), found.each)
    narrow = tf.cast(
        flat.ids,
        tf.int32 if feature.table.vocabulary_size < 2**31 else tf.int64,
    )
    flat = dataclasses.replace(flat, ids=narrow)
    if feature.padding_id is not None:
        no_padding = tf.not_equal(narrow, feature.padding_id)
        present = no_padding if present is None else present & no_padding
    if present is not None and not compiled:
        flat, present = _keep(flat, present), None
    limit = _limit(feature, kind_of(ids))
    if feature.is_combined and limit is None:
        bag, num_bags = flat.bag, flat.num_rows
        leading: list[Any] = [flat.num_rows]
    else:
        flat, present, bag, num_bags, leading = _place(
            feature, flat, present, limit, compiled
        )
    if present is not None:
        flat = dataclasses.replace(flat, ids=tf.where(present, flat.ids, -1))
    one_each = (
        flat.width == (1 if feature.is_combined else leading[1])
        and dropped is None
        and real is None
        and flat.weights is None
        and kind_of(ids) == DENSE
    )
    return Bags(
        flat.ids,
        bag,
        num_bags,
        flat.weights,
        present,
        one_each,
        leading,
        dropped,
        flat.lengths if bag is flat.bag else None,
    )


def _flatten(
    feature: Feature, ids: Any, weights: Any, compiled: bool, checks: Checks
) -> _Flat:
    if weights is not None:
        weights = tf.cast(weights, tf.float32)
    if isinstance(ids, tf.RaggedTensor):
        bag = _row_of_each(ids, compiled)
        num_rows = ids.shape[0]
        if num_rows is None:
            num_rows = tf.cast(ids.nrows(), tf.int32)
        if weights is not None:
            if weights.row_splits is not ids.row_splits:
                checks.add_equal(
                    feature,
                    "row_splits",
                    ids.row_splits,
                    tf.cast(weights.row_splits, ids.row_splits.dtype),
                    compiled,
                )
            weights = weights.values
        lengths = ids.row_lengths()
        return _Flat(ids.values, bag, num_rows, None, weights, lengths)
    if isinstance(ids, tf.SparseTensor):
        return _flatten_sparse(feature, ids, weights, compiled, checks)
    if weights is not None:
        shapes = (*ids.shape.as_list(), *weights.shape.as_list())
        if None in shapes:
            checks.add_equal(
                feature, "shape", _shape_2d(ids), _shape_2d(weights), compiled
            )
        weights = tf.reshape(weights, [-1])
    static = ids.shape.as_list()
    width = static[1] if len(static) == 2 else 1
    if (
        width is None
        and feature.input_shape is not None
        and not compiled
        and (expected := ([*feature.input_shape, 1])[1]) is not None
    ):
        checks.add_width(feature, tf.shape(ids)[1], expected)
    num_rows = tf.shape(ids)[0] if static[0] is None else static[0]
    flat_ids = tf.reshape(ids, [-1])
    if width == 1:
        bag = tf.range(num_rows)
    else:
        columns = tf.shape(ids)[1] if width is None else width
        bag = tf.repeat(tf.range(num_rows), columns)
    return _Flat(flat_ids, bag, num_rows, width, weights)


def _row_of_each(ids: tf.RaggedTensor, compiled: bool) -> tf.Tensor:
    """`[N]` int32: the example of each id."""
    if compiled or compilation.has_gpu():
        return tf.cast(ids.value_rowids(), tf.int32)
    # One operation, for CPUs alone, where the other way takes ten; half the
    # time.
    return tf.cast(ids.to_sparse().indices[:, 0], tf.int32)


def _gated(flat: _Flat, checks: list[tf.Operation]) -> _Flat:
    """The same, once the checks have passed."""
    if not checks:
        return flat
    with tf.control_dependencies(checks):
        weights = flat.weights
        return dataclasses.replace(
            flat,
            ids=tf.identity(flat.ids),
            bag=tf.identity(flat.bag),
            weights=None if weights is None else tf.identity(weights),
        )


def _shape_2d(dense: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(dense)
    return shape if dense.shape.rank == 2 else tf.stack([shape[0], 1])


def _flatten_sparse(
    feature: Feature,
    ids: tf.SparseTensor,
    weights: tf.SparseTensor | None,
    compiled: bool,
    checks: Checks,
) -> _Flat:
    """Orders the ids by row and column; several in one cell keep their order.

    Only the number of ids counts for time and memory, never `dense_shape`.
    """
    indices = ids.indices
    if weights is not None and weights.indices is not indices:
        checks.add_equal(feature, "indices", indices, weights.indices, compiled)
    values = ids.values
    weight_values = None
    if weights is not None:
        # Before they are reordered alongside the ids.
        with tf.control_dependencies(checks.run_early()):
            weight_values = tf.identity(weights.values)
    rows = indices[:, 0]
    columns = indices[:, 1] if ids.shape.rank == 2 else tf.zeros_like(rows)

    def in_order() -> tf.Tensor:
        by_column = tf.argsort(columns, stable=True)
        by_row = tf.argsort(tf.gather(rows, by_column), stable=True)
        return tf.gather(by_column, by_row)

    as_they_are = tf.range(tf.size(rows))
    later_row = rows[1:] > rows[:-1]
    later_column = (rows[1:] == rows[:-1]) & (columns[1:] >= columns[:-1])
    if compiled:
        order = in_order()
    else:
        order = tf.cond(
            tf.reduce_all(later_row | later_column),
            lambda: as_they_are,
            in_order,
        )
    rows = tf.gather(rows, order)
    values = tf.gather(values, order)
    if weight_values is not None:
        weight_values = tf.gather(weight_values, order)
    num_rows = ids.shape[0]
    if num_rows is None:
        num_rows = tf.cast(ids.dense_shape[0], tf.int32)
    if not compiled:
        checks.add_rows_within(feature, rows, ids.dense_shape[0])
    return _Flat(values, tf.cast(rows, tf.int32), num_rows, None, weight_values)


class _OutOfRange:
    """Which ids are outside their table, asked before any cast that could wrap.

    Args:
        feature: Whose table.
        ids: `[N]`, as they came.
        real: `[N]` bool, False where a row was added: it holds no id, so not
            even a bad one. None: all are real.
    """

    def __init__(
        self, feature: Feature, ids: tf.Tensor, real: tf.Tensor | None
    ) -> None:
        self._real = real
        size = feature.table.vocabulary_size
        if ids.dtype != tf.uint64:
            if ids.dtype not in (tf.int32, tf.int64):
                wide = tf.int64 if ids.dtype == tf.uint32 else tf.int32
                ids = tf.cast(ids, wide)
            size = min(size, ids.dtype.max + 1)
            # Read as unsigned, a negative id is larger than any table.
            ids = tf.bitcast(ids, tf.as_dtype(f"u{ids.dtype.name}"))
        self._ids, self._size = ids, tf.constant(size, ids.dtype)

    def each(self) -> tf.Tensor:
        """`[N]` bool."""
        bad = self._ids >= self._size
        return bad if self._real is None else bad & self._real

    def any(self) -> tf.Tensor:
        """Scalar bool."""
        if self._real is not None or compilation.has_gpu():
            return tf.reduce_any(self.each())
        # Without making a mask. GPUs have no kernel for it.
        return tf.reduce_max(self._ids) >= self._size


def _limit(feature: Feature, kind: str) -> int | None:
    """The most ids of an example that count, if that is less than it has."""
    limits = []
    declared = feature.input_shape
    if kind != DENSE and declared is not None and len(declared) == 2:
        limits.append(declared[1])
    if not feature.is_combined:
        assert feature.output_shape is not None
        limits.append(feature.output_shape[1])
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _place(
    feature: Feature,
    flat: _Flat,
    present: tf.Tensor | None,
    limit: int | None,
    compiled: bool,
) -> tuple[_Flat, tf.Tensor | None, tf.Tensor, Any, list[Any]]:
    """Cuts rows to `limit` ids and, if not combined, gives each id a bag."""
    position, longest = _positions(flat, present)
    positions = limit
    if not feature.is_combined:
        assert feature.output_shape is not None
        positions = feature.output_shape[1]
        if positions is None:
            positions = limit if limit is not None else flat.width
        if positions is None:
            positions = longest
    fits_all = flat.width is not None and limit == flat.width
    if limit is not None and not fits_all:
        within = position < limit
        if compiled:
            present = within if present is None else present & within
            position = tf.minimum(position, limit - 1)
        else:
            position = tf.boolean_mask(position, within)
            flat = _keep(flat, within)
    if feature.is_combined:
        return flat, present, flat.bag, flat.num_rows, [flat.num_rows]
    bag = flat.bag * positions + position
    leading = [flat.num_rows, positions]
    return flat, present, bag, flat.num_rows * positions, leading


def _positions(
    flat: _Flat, present: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """How many ids of its own example stand before each id, and the most."""
    if present is None:
        present = tf.ones_like(flat.bag, tf.bool)
    counted = tf.cast(present, tf.int32)
    lengths = tf.math.unsorted_segment_sum(counted, flat.bag, flat.num_rows)
    starts = tf.cumsum(lengths, exclusive=True)
    before = tf.cumsum(counted, exclusive=True)
    longest = tf.reduce_max(tf.concat([lengths, [0]], 0))
    return before - tf.gather(starts, flat.bag), longest


def _keep(flat: _Flat, mask: tf.Tensor) -> _Flat:
    weights = flat.weights
    return dataclasses.replace(
        flat,
        ids=tf.boolean_mask(flat.ids, mask),
        bag=tf.boolean_mask(flat.bag, mask),
        width=None,
        lengths=None,
        weights=None if weights is None else tf.boolean_mask(weights, mask),
    )
