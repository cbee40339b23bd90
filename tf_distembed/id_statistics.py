"""Counts of dropped ids, one a feature."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class DroppedIds:
    """How many ids of each feature were dropped since the last reset.

    One variable, counted on each replica and summed when read. It belongs to
    no layer: it is neither a weight nor part of any saved state.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        with tf.init_scope():
            self.counts = tf.Variable(
                tf.zeros([len(self._names)], tf.int64),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
                name="dropped_ids",
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
        self.counts.assign(tf.zeros_like(self.counts))
