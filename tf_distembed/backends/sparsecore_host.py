"""What happens to a batch on a TPU's host, before it reaches a SparseCore.

A TPU neither raises errors nor knows ragged tensors, so every rule on ids and
weights is applied here, in the block in which `TPUEmbeddingV2` sorts a batch
for the SparseCores: the range check before any cast, dropping, cutting, one
sample a position, padding to the static batch. What is handed on is one ragged
tensor of valid int32 ids a feature, whose rows are the static samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_distembed.backends.replica_inputs import as_on_host
from tf_distembed.backends.sparsecore_layout import ALIGNMENT, TableLayout
from tf_distembed.bags import Bags, to_bags
from tf_distembed.features import Feature
from tf_distembed.id_statistics import DroppedIds, LimitStatistics
from tf_distembed.value_checks import Checks


@dataclasses.dataclass(frozen=True)
class StackLimits:
    """How many ids of one stack the buffers of a SparseCore take.

    Attributes:
        tables: Names of its tables.
        max_ids: The most ids that one partition of a batch may hold.
        max_unique_ids: Likewise, distinct ids.
        max_ids_per_chip: The most ids of a chip's batch, each partition
            rounded up to a multiple of 8.
        per_sample: What `max_ids_per_chip` is for one sample.
    """

    tables: tuple[str, ...]
    max_ids: int
    max_unique_ids: int
    max_ids_per_chip: int
    per_sample: int


class HostRules:
    """Applies the rules to one replica's batch.

    Args:
        features: In flat order.
        rows: Examples of a replica's batch.
        positions: feature name -> samples of one example.
        dropped: Counts dropped ids.
        layouts: table name -> layout.
        limits: stack name -> its limits, in the order of the stacks; empty
            where there are none.
        statistics: Measures what the stacks need, or None.
        may_drop: Whether TensorFlow drops the ids that are too many for a
            chip; too many for a partition are always an error.

    Attributes:
        rows: Examples of a replica's batch.
        limits: stack name -> its limits.
        counted: The rows that each feature had in the batch it was last
            called with.
    """

    def __init__(
        self,
        features: Sequence[Feature],
        rows: int,
        positions: dict[str, int],
        dropped: DroppedIds,
        *,
        layouts: dict[str, TableLayout] | None = None,
        limits: dict[str, StackLimits] | None = None,
        statistics: LimitStatistics | None = None,
        may_drop: bool = False,
    ) -> None:
        self.rows = rows
        self.limits = limits or {}
        self.counted: list[Any] = []
        self._features = features
        self._positions = positions
        self._dropped = dropped
        self._layouts = layouts or {}
        self._statistics = statistics
        self._may_drop = may_drop

    def __call__(
        self, ids: Sequence[Any], weights: Sequence[Any]
    ) -> tuple[list[tf.RaggedTensor], list[tf.RaggedTensor | None]]:
        """Ragged ids and weights of all features, a row for each sample."""
        checks = Checks()
        ids = [_on_host(one) for one in ids]
        weights = [_on_host(one) for one in weights]
        bags = [
            to_bags(feature, one, weight, compiled=False, checks=checks)
            for feature, one, weight in zip(
                self._features, ids, weights, strict=True
            )
        ]
        self.counted = [one.leading_shape[0] for one in bags]
        for feature, rows in zip(self._features, self.counted, strict=True):
            self._check_rows(feature, rows, checks)
        self._dropped.add(
            {
                feature.name: one.dropped
                for feature, one in zip(self._features, bags, strict=True)
            }
        )
        with tf.control_dependencies(checks.run()):
            bags = [
                dataclasses.replace(one, ids=tf.identity(one.ids))
                for one in bags
            ]
        with tf.control_dependencies(self._check_limits(bags)):
            return (
                [
                    self._ragged(feature, one, one.ids)
                    for feature, one in zip(self._features, bags, strict=True)
                ],
                [
                    None
                    if one.weights is None
                    else self._ragged(feature, one, one.weights)
                    for feature, one in zip(self._features, bags, strict=True)
                ],
            )

    def _check_rows(self, feature: Feature, rows: Any, checks: Checks) -> None:
        if isinstance(rows, int):
            return  # the caller has seen it

        def message() -> tf.Tensor:
            return tf.strings.format(
                f"{feature.where}: a replica's batch has at most {self.rows} "
                "examples. Received: {} examples. Feed smaller batches, or "
                "declare a larger one.",
                rows,
            )

        checks.add(rows > self.rows, message)

    def _samples(self, feature: Feature) -> int:
        return self.rows * self._positions[feature.name]

    def _ragged(
        self, feature: Feature, bags: Bags, values: tf.Tensor
    ) -> tf.RaggedTensor:
        samples = self._samples(feature)
        lengths = tf.math.unsorted_segment_sum(
            tf.ones_like(bags.bag), bags.bag, samples
        )
        row_splits = tf.concat([[0], tf.cumsum(lengths)], 0)
        if values.dtype.is_integer:
            values = tf.cast(values, tf.int32)
        return tf.RaggedTensor.from_row_splits(
            tf.identity(values), row_splits, validate=False
        )

    def _check_limits(self, bags: Sequence[Bags]) -> list[tf.Operation]:
        checks = Checks()
        needed = []
        for stack, limits in self.limits.items():
            members = [
                (self._layouts[feature.table.name], self._samples(feature), one)
                for feature, one in zip(self._features, bags, strict=True)
                if self._layouts[feature.table.name].stack_name == stack
            ]
            needs = _needs(members, limits, self._statistics is not None)
            needed.append(needs)
            _check_needs(needs, limits, checks, self._may_drop)
        operations = checks.run()
        if self._statistics is not None:
            with tf.control_dependencies(operations):
                self._statistics.add(tf.stack(needed))
        return operations


def _on_host(value: Any) -> Any:
    """An input as the host block has it, with nothing from outside of it."""
    if isinstance(value, tf.Tensor):
        return as_on_host(value)
    if isinstance(value, tf.RaggedTensor):
        # One of uniform rows was given its number of rows by the replica.
        return tf.RaggedTensor.from_row_splits(
            value.values, value.row_splits, validate=False
        )
    return value


def _needs(
    members: Sequence[tuple[TableLayout, int, Bags]],
    limits: StackLimits,
    always_exact: bool,
) -> tf.Tensor:
    """What the ids of a batch need of the buffers of a stack.

    Counting every id is cheap; the exact count, which takes the ids of one
    sample and of one partition once, is made only if that is too much.

    Returns:
        `[3]` int32: ids of a partition, distinct ids of a partition, ids of a
        chip with padding; if not exact, at least that and within the limits.
    """
    topology = members[0][0].topology
    shards, cores = topology.num_shards, topology.sparsecores_per_chip
    partitions = shards * cores
    part, sample, row, first_sample = [], [], [], 0
    for layout, samples, bags in members:
        ids = tf.cast(bags.ids, tf.int64)
        core = tf.cast(bags.bag // (samples // cores), tf.int64)
        shard = (ids + layout.rotation) % shards
        part.append(core * shards + shard)
        sample.append(tf.cast(bags.bag, tf.int64) + first_sample)
        row.append((ids // shards + layout.offset) * shards + shard)
        first_sample += samples
    parts = tf.concat(part, 0)
    rows = tf.concat(row, 0)
    samples_of = tf.concat(sample, 0)
    stack_rows = members[0][0].shard_rows * shards

    def counts(keys: tf.Tensor) -> tf.Tensor:
        unique_keys, place = tf.unique(keys)
        of_key = tf.math.unsorted_segment_max(
            parts, place, tf.size(unique_keys)
        )
        return _count(of_key, partitions)

    def needs(of_parts: tf.Tensor, unique: tf.Tensor) -> tf.Tensor:
        padded = -(-of_parts // ALIGNMENT) * ALIGNMENT
        return tf.stack(
            [
                tf.reduce_max(of_parts),
                tf.reduce_max(unique),
                tf.reduce_sum(padded),
            ]
        )

    most = tf.constant(
        [limits.max_ids, limits.max_unique_ids, limits.max_ids_per_chip]
    )
    every = _count(parts, partitions)
    at_most = needs(every, every)
    return tf.cond(
        tf.reduce_any(at_most > most) | always_exact,
        lambda: needs(
            counts(samples_of * stack_rows + rows),
            counts((parts // shards) * stack_rows + rows),
        ),
        lambda: at_most,
    )


def _check_needs(
    needs: tf.Tensor, limits: StackLimits, checks: Checks, may_drop: bool
) -> None:
    """Reports what does not fit: TensorFlow's own error names no setting."""
    settings = [
        ("max_ids_per_partition", limits.max_ids, limits.max_ids),
        (
            "max_unique_ids_per_partition",
            limits.max_unique_ids,
            limits.max_unique_ids,
        ),
    ]
    if not may_drop:
        settings.append(
            (
                "max_ids_per_chip_per_sample (of sparse_core_embedding_config)",
                limits.per_sample,
                limits.max_ids_per_chip,
            )
        )
    for i, (setting, value, most) in enumerate(settings):
        needed = needs[i]
        if most != value:
            needed = -(-needed // (most // value))
        checks.add(
            needs[i] > most,
            _limit_message(limits.tables, setting, value, needed),
        )


def _limit_message(
    tables: Sequence[str], setting: str, value: int, needed: tf.Tensor
) -> Any:
    def message() -> tf.Tensor:
        return tf.strings.format(
            f"The batch does not fit the SparseCore buffers of the stack of "
            f"tables {list(tables)}: {setting} is {value} (the sum over the "
            "tables of the stack), and {} are needed. Raise it, stack fewer "
            "tables (table_stacking), or use smaller batches.",
            needed,
        )

    return message


def _count(parts: tf.Tensor, partitions: int) -> tf.Tensor:
    ones = tf.ones_like(parts, tf.int32)
    return tf.math.unsorted_segment_sum(ones, parts, partitions)
