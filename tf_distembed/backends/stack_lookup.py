"""The lookup of stacks, from whatever holds the rows of their tables.

Training looks up each distinct row of a table once. `tf.unique` finds them:
on CPUs one a table, which run beside each other, on a GPU, where each has to
be waited for, one a stack. The gradient of that gather already is
`tf.IndexedSlices` of distinct ids.

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
        how = [feature.table.combiner for feature in stack.features]
        if unique:
            pooled = self._pool_distinct(stack, of_stack, how)
        else:
            each = self._gather_each(stack, [one.ids for one in of_stack])
            pooled = combiners.pool_each(each, of_stack, how)
        return {
            feature.name: _shaped(feature, one, output)
            for feature, one, output in zip(
                stack.features, of_stack, pooled, strict=True
            )
        }

    def _pool_distinct(
        self, stack: Stack, bags: list[Bags], how: list[str]
    ) -> list[tf.Tensor]:
        """Reads each distinct row once.

        Tables are pooled one by one: to pool a stack at once, its rows and
        the gradients of its outputs would be copied to lie side by side.
        """
        members = [
            [i for i, f in enumerate(stack.features) if f.table is table]
            for table in stack.tables
        ]
        distinct = self._distinct_ids(
            stack, [_concat([bags[i].ids for i in own]) for own in members]
        )
        pooled: list[tf.Tensor] = []
        for table, own, (ids, places) in zip(
            stack.tables, members, distinct, strict=True
        ):
            pooled += combiners.pool(
                self._distinct_rows[table.name](ids),
                _split(places, [tf.size(bags[i].ids) for i in own]),
                [bags[i] for i in own],
                [how[i] for i in own],
            )
        return pooled

    def _distinct_ids(
        self, stack: Stack, ids: list[tf.Tensor]
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """For each table its distinct ids, and the place of each id in them."""
        if len(ids) == 1 or not compilation.has_gpu():
            return [_unique(part) for part in ids]
        dtype = tf.int32 if stack.num_rows < 2**31 else tf.int64
        shifted = [
            tf.cast(part, dtype) + offset
            for part, offset in zip(ids, stack.offsets, strict=True)
        ]
        # What stands at the end is no id; its place is the number of them.
        shifted.append(tf.constant([stack.num_rows], dtype))
        unique_ids, places = _unique(tf.concat(shifted, 0))
        # Distinct ids keep the order in which they come first, and so that of
        # the tables: the first id of a table is the first of its distinct ones.
        sizes = [tf.size(part) for part in shifted]
        firsts = tf.gather(places, tf.cumsum(sizes, exclusive=True))
        counts = tf.concat([firsts[1:] - firsts[:-1], [1]], 0)
        return [
            (own - offset, place - first)
            for own, offset, place, first in zip(
                tf.split(unique_ids, counts, num=len(shifted))[:-1],
                stack.offsets,
                tf.split(places, sizes)[:-1],
                tf.unstack(firsts, len(shifted))[:-1],
                strict=True,
            )
        ]

    def _gather_each(
        self, stack: Stack, ids: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """For each feature the row of each id, repeated or not."""
        rows: list[tf.Tensor] = []
        for table in stack.tables:
            # Features come in the order of their tables.
            own = [
                part
                for feature, part in zip(stack.features, ids, strict=True)
                if feature.table is table
            ]
            read = self._rows[table.name](_concat(own))
            rows += _split(read, [tf.size(part) for part in own])
        return rows


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
