"""Tables on the default device: CPU, GPU, or a TPU's TensorCore.

Training looks up each distinct row of a stack once: one `tf.unique` over the
stack's ids, which come grouped by table, so the distinct ids do too. The
gradient of that gather already is `tf.IndexedSlices` of distinct ids.

Inference skips `tf.unique`. XLA cannot have it either, since its shapes would
depend on values; there every id reads its own row and the update sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_distembed import combiners, row_optimizers
from tf_distembed.backends import base, compilation
from tf_distembed.config import TableConfig
from tf_distembed.features import Feature
from tf_distembed.id_statistics import DroppedIds
from tf_distembed.inputs import Bags, Checks, to_bags
from tf_distembed.stacking import Stack, make_stacks
from tf_distembed.tables import VALUES, EmbeddingTable


class DefaultDeviceBackend(base.Backend):
    """The tables of `placement="default_device"`.

    Args:
        features: Its features, in flat order.
        tables: Their tables, in order of configuration.
        optimizers: table name -> optimizer object in use, or None.
        table_stacking: As the layer's.
        dtype: Name of the tables' dtype.
        dropped: Counts dropped ids.
    """

    placement = "default_device"

    def __init__(
        self,
        features: Sequence[Feature],
        tables: Sequence[TableConfig],
        optimizers: dict[str, Any],
        table_stacking: Any,
        dtype: str,
        dropped: DroppedIds,
    ) -> None:
        self.features = features
        self._dropped = dropped
        keys = {
            table.name: {
                "embedding_dim": table.embedding_dim,
                "optimizer": _optimizer_key(table, optimizers[table.name]),
            }
            for table in tables
        }
        self._stacks = make_stacks(tables, features, table_stacking, keys)
        self.tables = {
            table.name: EmbeddingTable(table, optimizers[table.name], dtype)
            for table in tables
        }
        self.optimizers = {
            name: _in_use(table, optimizers[name])
            for name, table in self.tables.items()
            if table.row_optimizer is not None
        }

    def lookup(
        self,
        ids: Sequence[Any],
        weights: Sequence[Any],
        training: bool,
    ) -> list[tf.Tensor]:
        compiled = compilation.compiled_by_xla()
        checks = Checks()
        bags = {
            feature.name: to_bags(
                feature, one, weight, compiled=compiled, checks=checks
            )
            for feature, one, weight in zip(
                self.features, ids, weights, strict=True
            )
        }
        self._dropped.add({name: one.dropped for name, one in bags.items()})
        unique = training and not compiled
        outputs: dict[str, tf.Tensor] = {}
        with tf.control_dependencies(checks.run()):
            for stack in self._stacks:
                outputs.update(self._lookup_stack(stack, bags, unique))
        return _tie([outputs[feature.name] for feature in self.features])

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
            rows = self.tables[stack.tables[0].name].rows(unique_ids)
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
            self.tables[table.name].rows(part - offset[table])
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
            rows.append(self.tables[table.name].rows(_concat(own)))
        places, start = [], 0
        for part in ids:
            stop = start + tf.size(part)
            places.append(tf.range(start, stop))
            start = stop
        return _concat(rows), places

    def slot_shapes(self) -> dict[str, dict[str, tuple[int, int]]]:
        return {
            name: {
                slot: tuple(variable.shape)
                for slot, variable in table.slots.items()
            }
            for name, table in self.tables.items()
        }

    def slot_dtype(self, table: str) -> str:
        return self.tables[table].embeddings.dtype

    def read_rows(
        self, table: str, slot: str, start: int, stop: int
    ) -> tf.Tensor:
        return self.tables[table].read_rows(slot, start, stop)

    def write_rows(self, table: str, slot: str, ids: Any, values: Any) -> None:
        self.tables[table].write_rows(slot, ids, values)

    def first_value(self, table: str, slot: str) -> float:
        row_optimizer = self.tables[table].row_optimizer
        if row_optimizer is None or slot == VALUES:
            raise KeyError(slot)
        return row_optimizer.rule.slots[slot]

    def read_step(self, table: str) -> tf.Tensor | None:
        step = self.tables[table].step
        return None if step is None else tf.convert_to_tensor(step.value)

    def write_step(self, table: str, step: Any) -> None:
        variable = self.tables[table].step
        if variable is not None:
            variable.value.assign(tf.cast(step, variable.dtype))


def _unique(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The distinct ids, and the place of each id among them.

    TensorFlow's graph optimizer turns unique -> gather -> sparse segment
    reduction into a reduction over the whole table, which it then reads, and
    copies, in every step. The maximum, which changes nothing, is there
    because the optimizer neither removes it nor looks through it.
    """
    unique_ids, places = tf.unique(ids)
    return tf.maximum(unique_ids, 0), places


def _optimizer_key(table: TableConfig, optimizer: Any) -> Any:
    """What must be equal for two tables to share a stack."""
    if optimizer is None or not table.trainable:
        return (table.trainable, None)
    if isinstance(table.optimizer, (str, dict)):
        rule = row_optimizers.rule_of(optimizer, f"Table '{table.name}'")
        return (
            rule,
            repr(row_optimizers.serialize(table.optimizer, "")).lower(),
        )
    return ("object", id(optimizer))


def _in_use(table: EmbeddingTable, optimizer: Any) -> Any:
    """The object whose `learning_rate` may be reassigned."""
    if row_optimizers.is_native(optimizer):
        return table.row_optimizer
    return optimizer


def _shaped(feature: Feature, bags: Bags, output: tf.Tensor) -> tf.Tensor:
    dim = feature.table.embedding_dim
    if not feature.is_combined:
        output = tf.reshape(output, [*bags.leading_shape, dim])
    static = [
        size if isinstance(size, int) else None for size in bags.leading_shape
    ]
    return tf.ensure_shape(output, [*static, dim])


def _tie(outputs: list[tf.Tensor]) -> list[tf.Tensor]:
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
