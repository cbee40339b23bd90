"""From ids and weights of any kind to one canonical form, `Bags`.

Every check of what a user feeds is here. What the Python types, dtypes and
static shapes tell is checked while a function is traced, also for Keras
tensors (`check_feature`); what only the values tell is checked when it runs.

A batch of three examples, whose second one is empty, is the same bags in each
of the kinds it can come in:

```
ragged [[7, 7], [], [3]]      ids  7 7 3
                              bag  0 0 2      num_bags 3
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_distembed.features import Feature

DENSE, RAGGED, SPARSE = "dense", "ragged", "sparse"

# Where an error shows a value; no feature or table has "/" in its name.
_VALUE = "{/}"


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
    """

    ids: tf.Tensor
    bag: tf.Tensor
    num_bags: Any
    weights: tf.Tensor | None
    present: tf.Tensor | None
    one_each: bool
    leading_shape: Sequence[Any]
    dropped: tf.Tensor | None


@dataclasses.dataclass(frozen=True)
class _Flat:
    """A batch before the rules on values: ids as they came, bags = examples."""

    ids: tf.Tensor
    bag: tf.Tensor
    num_rows: Any
    width: int | None
    weights: tf.Tensor | None


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
    shape = _static_shape(feature, ids, "ids")
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
        _static_shape(feature, ids, "ids"),
        _static_shape(feature, weights, "weights"),
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


def _static_shape(
    feature: Feature, value: Any, what: str
) -> tuple[int | None, ...]:
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
    narrow, bad = _out_of_range(feature, flat.ids)
    present = None
    dropped = None
    if compiled or feature.drops_invalid_ids:
        present = tf.logical_not(bad)
        dropped = tf.math.count_nonzero(bad)
    else:
        checks.add_range_check(feature, flat.ids, bad)
    flat = dataclasses.replace(flat, ids=narrow)
    if feature.padding_id is not None:
        real = tf.not_equal(narrow, feature.padding_id)
        present = real if present is None else present & real
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
    )


def _flatten(
    feature: Feature, ids: Any, weights: Any, compiled: bool, checks: Checks
) -> _Flat:
    if weights is not None:
        weights = tf.cast(weights, tf.float32)
    if isinstance(ids, tf.RaggedTensor):
        bag = tf.cast(ids.value_rowids(), tf.int32)
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
        return _Flat(ids.values, bag, num_rows, None, weights)
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


def _out_of_range(
    feature: Feature, ids: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """The ids in the dtype that addresses rows, and which are outside.

    The comparison comes before any cast that could wrap an id into the table.
    """
    size = feature.table.vocabulary_size
    target = tf.int32 if size < 2**31 else tf.int64
    if ids.dtype == tf.uint64:
        bad = ids >= tf.constant(size, tf.uint64)
    else:
        if ids.dtype not in (tf.int32, tf.int64):
            ids = tf.cast(ids, tf.int64 if ids.dtype == tf.uint32 else tf.int32)
        bad = ids < 0
        if size <= ids.dtype.max:
            bad |= ids >= size
    return tf.cast(ids, target), bad


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
        weights=None if weights is None else tf.boolean_mask(weights, mask),
    )


class Checks:
    """The checks on values of all features of a call.

    Those of the ids' range become one operation, whose error names every
    feature that is wrong, not the first. What must hold before the ids can be
    worked on at all is checked early, feature by feature.
    """

    def __init__(self) -> None:
        self._last: list[_Check] = []
        self._early: list[_Check] = []

    def add(self, fails: tf.Tensor, message: Callable[[], tf.Tensor]) -> None:
        """Adds a check: whether it fails, and what makes the message."""
        self._last.append(_Check(fails, message))

    def add_range_check(
        self, feature: Feature, ids: tf.Tensor, bad: tf.Tensor
    ) -> None:
        """Reports ids outside the table of a feature that does not drop."""

        def message() -> tf.Tensor:
            found = tf.boolean_mask(ids, bad)
            return tf.strings.format(
                f"{feature.where}: {feature.expected_ids}. Received: id "
                f"{_VALUE} ({_VALUE} such ids in this batch). "
                f"{feature.cure_of_ids}",
                (found[0], tf.size(found)),
                placeholder=_VALUE,
            )

        self.add(tf.reduce_any(bad), message)

    def add_equal(
        self,
        feature: Feature,
        what: str,
        ids: tf.Tensor,
        weights: tf.Tensor,
        compiled: bool,
    ) -> None:
        """Reports weights that do not lie beside the ids."""
        if compiled:
            return
        same_size = tf.reduce_all(tf.equal(tf.shape(ids), tf.shape(weights)))
        differ = tf.cond(
            same_size,
            lambda: tf.reduce_any(tf.not_equal(ids, weights)),
            lambda: True,
        )

        def message() -> tf.Tensor:
            return tf.strings.format(
                f"{feature.where}: the weights must have the same {what} as "
                f"the ids. Received: ids with {_VALUE}, weights with "
                f"{_VALUE}. Give each id a weight in the same place.",
                (ids, weights),
                placeholder=_VALUE,
            )

        self._early.append(_Check(differ, message))

    def add_width(
        self, feature: Feature, width: tf.Tensor, expected: int
    ) -> None:
        """Reports a dense width, unknown until now, that was not declared."""

        def message() -> tf.Tensor:
            return tf.strings.format(
                f"{feature.where}: input_shape={feature.input_shape} declares "
                f"{expected} ids an example. Received: {_VALUE} ids an example",
                width,
                placeholder=_VALUE,
            )

        self._early.append(_Check(tf.not_equal(width, expected), message))

    def add_rows_within(
        self, feature: Feature, rows: tf.Tensor, num_rows: tf.Tensor
    ) -> None:
        """Reports sparse indices outside dense_shape; `rows` ascend."""
        outside = tf.reduce_any(rows[:1] < 0) | tf.reduce_any(
            rows[-1:] >= num_rows
        )

        def message() -> tf.Tensor:
            return tf.strings.format(
                f"{feature.where}: sparse ids need row indices within their "
                f"dense_shape. Received: rows from {_VALUE} to {_VALUE}, "
                f"dense_shape[0]={_VALUE}",
                (rows[0], rows[-1], num_rows),
                placeholder=_VALUE,
            )

        self._early.append(_Check(outside, message))

    def run_early(self) -> list[tf.Operation]:
        """The operation that runs the early checks added since the last one.

        To be made a control dependency; empty if there is nothing to check.

        Raises:
            tf.errors.InvalidArgumentError: when run, if any check fails.
        """
        checks, self._early = self._early, []
        return _run(checks)

    def run(self) -> list[tf.Operation]:
        """As `run_early`, of all other checks."""
        return _run(self._last)


@dataclasses.dataclass(frozen=True)
class _Check:
    """Whether it fails, a scalar, and a function that makes the message."""

    fails: tf.Tensor
    message: Callable[[], tf.Tensor]


def _run(checks: Sequence[_Check]) -> list[tf.Operation]:
    if not checks:
        return []
    fails = tf.stack([check.fails for check in checks])

    def fail() -> tf.Tensor:
        messages = [
            tf.cond(check.fails, check.message, lambda: tf.constant(""))
            for check in checks
        ]
        found = tf.boolean_mask(tf.stack(messages), fails)
        text = tf.strings.reduce_join(found, separator=" ")
        failed = tf.debugging.Assert(False, [text], summarize=10)
        with tf.control_dependencies([failed] if failed is not None else []):
            return tf.constant(False)

    return [tf.cond(tf.reduce_any(fails), fail, lambda: tf.constant(True))]
