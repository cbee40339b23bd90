"""Counts of dropped ids, one a feature."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_distembed.config import TableConfig


class DroppedIds:
    """How many ids of each feature were dropped since the last reset.

    One variable, counted on each replica and summed when read. It belongs to
    no layer: it is neither a weight nor part of any saved state.
    """

    def __init__(self, names: Sequence[str], *, on_host: bool = False) -> None:
        self._names = list(names)
        with tf.init_scope():
            zeros = tf.zeros([len(self._names)], tf.int64)
            self.counts: Any = (
                _HostCounts(zeros)
                if on_host
                else tf.Variable(
                    zeros,
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.SUM,
                    name="dropped_ids",
                )
            )

    def add(self, dropped: dict[str, tf.Tensor | None]) -> None:
        """Adds the counts of one call; None where nothing can be dropped."""
        if all(count is None for count in dropped.values()):
            return
        none = tf.constant(0, tf.int64)
        counts = [dropped.get(name) for name in self._names]
        self.counts.assign_add(
            tf.stack([none if count is None else count for count in counts])
        )

    def read(self) -> dict[str, int]:
        """feature name -> how many of its ids were dropped."""
        values = self.counts.read_value().numpy()
        return dict(zip(self._names, map(int, values), strict=True))

    def reset(self) -> None:
        """Starts again from 0."""
        self.counts.assign(tf.zeros([len(self._names)], tf.int64))


class LimitStatistics:
    """The most that any batch needed of the SparseCore limits.

    Args:
        stacks: The tables of each stack.
    """

    def __init__(self, stacks: Sequence[Sequence[TableConfig]]) -> None:
        self._stacks = [[table.name for table in stack] for stack in stacks]
        with tf.init_scope():
            self._most = _HostCounts(tf.zeros([len(self._stacks), 3], tf.int64))

    def add(self, needs: tf.Tensor) -> None:
        """Takes what a batch needs, `[stacks, 3]`, into account."""
        self._most.raise_to(tf.cast(needs, tf.int64))

    def read(self) -> list[dict[str, Any]]:
        """For each stack its tables and what they needed together."""
        return [
            {
                "tables": tables,
                "max_ids_per_partition": int(ids),
                "max_unique_ids_per_partition": int(unique_ids),
            }
            for tables, (ids, unique_ids, _) in zip(
                self._stacks, self._most.read_value().numpy(), strict=True
            )
        ]

    def reset(self) -> None:
        """Starts again from 0."""
        self._most.assign(tf.zeros([len(self._stacks), 3], tf.int64))


class _HostCounts:
    """A resource on the host that no strategy distributes.

    A variable made in the scope of a TPU's strategy lives on the chips; what
    is counted on the host, for all of them, must not. Its few bytes stay until
    the process ends: freed while a function is traced, it blocked for ever.
    """

    def __init__(self, value: tf.Tensor) -> None:
        with tf.device("CPU:0"):
            self._handle = tf.raw_ops.VarHandleOp(
                dtype=value.dtype,
                shape=value.shape,
                shared_name=uuid.uuid4().hex,
            )
            self.assign(value)

    def assign(self, value: tf.Tensor) -> None:
        tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)

    def assign_add(self, value: tf.Tensor) -> None:
        tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=value)

    def raise_to(self, value: tf.Tensor) -> None:
        """Makes each count at least the given one."""
        tf.raw_ops.ResourceScatterMax(
            resource=self._handle,
            indices=tf.range(tf.shape(value)[0]),
            updates=value,
        )

    def read_value(self) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int64)
