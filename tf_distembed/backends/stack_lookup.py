"""The lookup of stacks, from whatever holds the rows of their tables.

Training looks up each distinct row of a stack once: one `tf.unique` over the
stack's ids, which come grouped by table, so the distinct ids do too. The
gradient of that gather already is `tf.IndexedSlices` of distinct ids.

Inference skips `tf.unique`. XLA cannot have it either, since its shapes would
depend on values; there every id reads its own row and the update sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_distembed import combiners
from tf_distembed.backends import compilation
from tf_distembed.bags import Bags, to_bags
from tf_distembed.features import Feature
from tf_distembed.id_statistics import DroppedIds
from tf_distembed.stacking import Stack
from tf_distembed.value_checks import Checks

#: Reads rows of one table: ids `[N]` -> `[N, embedding_dim]`.
RowReader = Callable[[tf.Tensor], tf.Tensor]


class StackLookup:
    """Looks up and combines features whose tables are grouped into stacks.

    Args:
        features: In flat order.
        stacks: Their tables, grouped.
        rows: table name -> reader of its rows.
        dropped: Counts dropped ids; None: nobody counts.
        distinct_rows: As `rows`, asked when no two ids are equal.
    """

    def __init__(
        self,
        features: Sequence[Feature],
        stacks: Sequence[Stack],
        rows: Mapping[str, RowReader],
        dropped: DroppedIds | None,
        distinct_rows: Mapping[str, RowReader] | None = None,
    ) -> None:
        self._features = features
        self._stacks = stacks
        self._rows = rows
        self._dropped = dropped
        self._distinct_rows = rows if distinct_rows is None else distinct_rows

    def __call__(
        self, ids: Sequence[Any], weights: Sequence[Any], *, unique: bool
    ) -> list[tf.Tensor]:
        """Looks up and combines one batch.

        Args:
            ids: For each feature a dense, ragged or sparse tensor.
            weights: For each feature the same kind, or None.
            unique: Whether to read each distinct row once, as training does,
                where that can be.

        Returns:
            For each feature `[B, D]` or `[B, S, D]`, of the rows' dtype.
        """
        compiled = compilation.compiled_by_xla()
        checks = Checks()
        bags = {
            feature.name: to_bags(
                feature, one, weight, compiled=compiled, checks=checks
            )
            for feature, one, weight in zip(
                self._features, ids, weights, strict=True
            )
        }
        if self._dropped is not None:
            self._dropped.add({name: b.dropped for name, b in bags.items()})
        unique = unique and not compiled
        outputs: dict[str, tf.Tensor] = {}
        with tf.control_dependencies(checks.run()):
            for stack in self._stacks:
                outputs.update(self._lookup_stack(stack, bags, unique))
        return tie([outputs[feature.name] for feature in self._features])

    def _lookup_stack(
        self, stack: Stack, bags: dict[str, Bags], unique: bool
    ) -> dict[str, tf.Tensor]:
        of_stack = [bags[feature.name] for feature in stack.features]
        gather = self._gather_unique if unique else self._gather_each
        rows, places = gather(stack, [one.ids for one in of_stack])
        pooled = combiners.pool(
            rows,
            places,
            of_stack,
            [feature.table.combiner for feature in stack.features],
        )
        return {
            feature.name: _shaped(feature, one, output)
            for feature, one, output in zip(
                stack.features, of_stack, pooled, strict=True
            )
        }

    def _gather_unique(
        self, stack: Stack, ids: list[tf.Tensor]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Each distinct row once, and the place of every id among them."""
        sizes = [tf.size(part) for part in ids]
        if len(stack.tables) == 1:
            unique_ids, places = _unique(_concat(ids))
            rows = self._distinct_rows[stack.tables[0].name](unique_ids)
            return rows, _split(places, sizes)
        dtype = tf.int32 if stack.num_rows < 2**31 else tf.int64
        offset = dict(zip(stack.tables, stack.offsets, strict=True))
        shifted = [
            tf.cast(part, dtype) + offset[feature.table]
            for feature, part in zip(stack.features, ids, strict=True)
        ]
        unique_ids, places = _unique(tf.concat(shifted, 0))
        # Ascending by table, though not within one.
        table_of = tf.searchsorted(
            tf.constant(stack.offsets[1:], dtype), unique_ids, side="right"
        )
        counts = tf.math.unsorted_segment_sum(
            tf.ones_like(table_of), table_of, len(stack.tables)
        )
        parts = tf.split(unique_ids, counts, num=len(stack.tables))
        rows = [
            self._distinct_rows[table.name](part - offset[table])
            for table, part in zip(stack.tables, parts, strict=True)
        ]
        return tf.concat(rows, 0), _split(places, sizes)

    def _gather_each(
        self, stack: Stack, ids: list[tf.Tensor]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """One row an id, repeated or not."""
        rows = []
        for table in stack.tables:
            own = [
                part
                for feature, part in zip(stack.features, ids, strict=True)
                if feature.table is table
            ]
            rows.append(self._rows[table.name](_concat(own)))
        places, start = [], 0
        for part in ids:
            stop = start + tf.size(part)
            places.append(tf.range(start, stop))
            start = stop
        return _concat(rows), places


def _unique(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The distinct ids, and the place of each id among them.

    TensorFlow's graph optimizer turns unique -> gather -> sparse segment
    reduction into a reduction over the whole table, which it then reads, and
    copies, in every step. The maximum, which changes nothing, is there
    because the optimizer neither removes it nor looks through it.
    """
    unique_ids, places = tf.unique(ids)
    return tf.maximum(unique_ids, 0), places


def _shaped(feature: Feature, bags: Bags, output: tf.Tensor) -> tf.Tensor:
    dim = feature.table.embedding_dim
    if not feature.is_combined:
        output = tf.reshape(output, [*bags.leading_shape, dim])
    static = [
        size if isinstance(size, int) else None for size in bags.leading_shape
    ]
    return tf.ensure_shape(output, [*static, dim])


def tie(outputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """The same tensors, of which all get a gradient if any of them does.

    A feature whose output is not used has gradient 0, not none: its rows are
    touched, and its table takes the step.
    """

    @tf.custom_gradient
    def identity(*values: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> Any:
            return upstream

        return [tf.identity(value) for value in values], gradient

    if len(outputs) == 1:
        return outputs
    return list(identity(*outputs))


def _concat(parts: list[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def _split(value: tf.Tensor, sizes: list[tf.Tensor]) -> list[tf.Tensor]:
    return [value] if len(sizes) == 1 else tf.split(value, sizes)
