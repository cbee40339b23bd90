"""The operations of a lookup and its update, written out without a layer.

One variable holds all tables, one after the other. Ids that come more than
once are found once; the rows read for the outputs are used again for the
update. What the layer costs beyond this is its overhead; the sums of the
gradients are the layer's own function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.contender import FIRST_SLOTS, LEARNING_RATE
from benchmarks.tf_contenders import TensorFlowContender
from benchmarks.workloads import Workload
from tf_distembed.sparse_product import weighted_sums

_ops = tf.raw_ops
_FORWARD = {
    "sum": _ops.SparseSegmentSumWithNumSegments,
    "mean": _ops.SparseSegmentMeanWithNumSegments,
    "sqrtn": _ops.SparseSegmentSqrtNWithNumSegments,
}


class RawOperations(TensorFlowContender):
    """Unweighted workloads only."""

    title = "raw operations"

    def __init__(self, workload: Workload, optimizer: str) -> None:
        super().__init__(workload)
        if workload.weighted:
            raise ValueError("not written for weights")
        self._optimizer = optimizer
        self._offsets = np.cumsum([0, *workload.tables])
        shape = [int(self._offsets[-1]), workload.dim]
        self._table = tf.Variable(
            tf.random.stateless_uniform(shape, [1, 2], -0.05, 0.05)
        )
        self._slots = [
            tf.Variable(tf.fill(shape, one)) for one in FIRST_SLOTS[optimizer]
        ]
        self._taken = tf.Variable(0.0)

    def _flat(self, ids: Any) -> tuple[list[tf.Tensor], tf.Tensor, list[int]]:
        """Ids within the variable, bags first; segments of bags; the order."""
        features = self.workload.features
        bags = [i for i, f in enumerate(features) if f.is_bag]
        ones = [i for i, f in enumerate(features) if not f.is_bag]
        parts, segments = [], []
        for place, i in enumerate(bags):
            value = ids[features[i].name]
            rows = tf.cast(value.value_rowids(), tf.int32)
            segments.append(rows + place * self.workload.batch_size)
            parts.append(self._shifted(value.values, i))
        parts += [self._shifted(ids[features[i].name], i) for i in ones]
        return parts, _concat(segments), bags + ones

    def _shifted(self, ids: tf.Tensor, feature: int) -> tf.Tensor:
        table = self.workload.features[feature].table
        ids = tf.cast(ids, tf.int32)
        return ids + int(self._offsets[table]) if table else ids

    def outputs(
        self, ids: Any, weights: Any, training: bool
    ) -> list[tf.Tensor]:
        parts, segments, order = self._flat(ids)
        rows = self._gather(self._table, _concat(parts))
        places = tf.range(tf.shape(rows)[0])
        return self._in_order(self._pool(rows, places, segments), order)

    def step(
        self, ids: Any, weights: Any, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        parts, segments, order = self._flat(ids)
        unique_ids, places = tf.unique(_concat(parts))
        # Without it the graph optimizer reads the whole table.
        unique_ids = tf.maximum(unique_ids, 0)
        rows = self._gather(self._table, unique_ids)
        outputs = self._in_order(self._pool(rows, places, segments), order)
        gradient = _concat([gradients[i] for i in order])
        back = self._back(gradient, places, segments, tf.shape(rows)[0])
        self._update(unique_ids, rows, back)
        return outputs

    @property
    def _bags(self) -> int:
        """Bags of all features that have any number of ids."""
        features = self.workload.features
        return sum(f.is_bag for f in features) * self.workload.batch_size

    def _pool(
        self, rows: tf.Tensor, places: tf.Tensor, segments: tf.Tensor
    ) -> list[tf.Tensor]:
        """Outputs `[F * B, D]`, in one or two parts."""
        in_bags = tf.size(segments)
        parts = []
        if self._bags:
            pooled = _FORWARD[self.workload.combiner](
                data=rows,
                indices=places[:in_bags],
                segment_ids=segments,
                num_segments=self._bags,
            )
            parts.append(pooled)
        if not all(f.is_bag for f in self.workload.features):
            parts.append(tf.gather(rows, places[in_bags:]))
        return parts

    def _in_order(
        self, parts: list[tf.Tensor], order: list[int]
    ) -> list[tf.Tensor]:
        """The output of each feature, of parts in another order."""
        size = self.workload.batch_size
        each: list[tf.Tensor] = []
        for part in parts:
            bags = [f for f in self.workload.features if f.is_bag]
            count = len(order) - len(each)
            count = len(bags) if bags and not each else count
            each += tf.split(part, [size] * count) if count > 1 else [part]
        return [each[order.index(i)] for i in range(len(order))]

    def _back(
        self,
        gradient: tf.Tensor,
        places: tf.Tensor,
        segments: tf.Tensor,
        count: tf.Tensor,
    ) -> tf.Tensor:
        in_bags = tf.size(segments)
        parts = []
        if self._bags:
            ones = tf.ones([in_bags])
            lengths = tf.math.unsorted_segment_sum(ones, segments, self._bags)
            gains = {
                "sum": tf.ones_like,
                "mean": tf.math.reciprocal_no_nan,
                "sqrtn": lambda x: tf.math.reciprocal_no_nan(tf.sqrt(x)),
            }[self.workload.combiner](lengths)
            pooled = weighted_sums(
                gradient[: self._bags] * gains[:, tf.newaxis],
                segments,
                places[:in_bags],
                ones,
                count,
            )
            parts.append(pooled)
        if not all(f.is_bag for f in self.workload.features):
            own = places[in_bags:]
            picked = weighted_sums(
                gradient[self._bags :],
                tf.range(tf.size(own)),
                own,
                tf.ones_like(own, tf.float32),
                count,
            )
            parts.append(picked)
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def _update(
        self, ids: tf.Tensor, rows: tf.Tensor, gradient: tf.Tensor
    ) -> None:
        rate = LEARNING_RATE
        old = [self._gather(slot, ids) for slot in self._slots]
        new = []
        if self._optimizer == "sgd":
            rows -= rate * gradient
        elif self._optimizer == "adagrad":
            new = [old[0] + gradient * gradient]
            rows -= rate * gradient * tf.math.rsqrt(new[0] + 1e-7)
        elif self._optimizer == "adam":
            t = self._taken.assign_add(1.0)
            alpha = rate * tf.sqrt(1 - 0.999**t) / (1 - 0.9**t)
            new = [
                0.9 * old[0] + 0.1 * gradient,
                0.999 * old[1] + 0.001 * gradient * gradient,
            ]
            rows -= alpha * new[0] / (tf.sqrt(new[1]) + 1e-7)
        else:
            total = old[0] + gradient * gradient
            root = tf.sqrt(total)
            growth = (root - tf.sqrt(old[0])) / rate
            new = [total, old[1] + gradient - growth * rows]
            rows = -new[1] * rate / root
        for slot, value in zip(self._slots, new, strict=True):
            self._write(slot, ids, value)
        self._write(self._table, ids, rows)

    def _gather(self, variable: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
        return _ops.ResourceGather(
            resource=variable.handle, indices=ids, dtype=tf.float32
        )

    def _write(
        self, variable: tf.Variable, ids: tf.Tensor, rows: tf.Tensor
    ) -> None:
        _ops.ResourceScatterUpdate(
            resource=variable.handle, indices=ids, updates=rows
        )

    def set_tables(self, values: Sequence[np.ndarray]) -> None:
        self._table.assign(np.concatenate(values))

    def get_tables(self) -> list[np.ndarray]:
        return np.split(self._table.numpy(), self._offsets[1:-1])


def _concat(parts: list[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)
