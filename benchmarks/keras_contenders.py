"""Keras' and TensorFlow's own ways, and keras-rs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import keras_rs
import numpy as np
import tensorflow as tf

from benchmarks.contender import FIRST_SLOTS, LEARNING_RATE
from benchmarks.tf_contenders import (
    LayerContender,
    TensorFlowContender,
    keras_optimizer,
)
from benchmarks.workloads import Ids, Workload


class KerasRs(LayerContender):
    """`keras_rs.layers.DistributedEmbedding`, ragged ids, Keras optimizer.

    Its sparse ids are slower: it copies the table to look them up.
    """

    title = "keras-rs"

    def __init__(self, workload: Workload, optimizer: str) -> None:
        super().__init__(workload)
        size, dim = workload.batch_size, workload.dim
        tables = [
            keras_rs.layers.TableConfig(
                f"t{i}", rows, dim, combiner=workload.combiner
            )
            for i, rows in enumerate(workload.tables)
        ]
        self.layer = keras_rs.layers.DistributedEmbedding(
            {
                f.name: keras_rs.layers.FeatureConfig(
                    f.name,
                    tables[f.table],
                    (size, None) if f.is_bag else (size,),
                    (size, dim),
                )
                for f in workload.features
            }
        )
        self.optimizer = keras_optimizer(optimizer)

    def _variables(self) -> list[keras.Variable]:
        found = {v.path.split("/")[-2]: v for v in self.layer.variables}
        return [found[f"t{i}"] for i in range(len(self.workload.tables))]

    def set_tables(self, values: Sequence[np.ndarray]) -> None:
        for variable, value in zip(self._variables(), values, strict=True):
            variable.assign(value)

    def get_tables(self) -> list[np.ndarray]:
        return [np.array(variable) for variable in self._variables()]


class KerasEmbedding(LayerContender):
    """`keras.layers.Embedding` on padded ids, then the reduction.

    The ids come padded to the longest example of all batches, as users of
    that layer prepare them; the padding is not in the time.
    """

    title = "keras Embedding + reduce"

    def __init__(self, workload: Workload, optimizer: str) -> None:
        super().__init__(workload)
        self._embeddings = [
            keras.layers.Embedding(rows, workload.dim)
            for rows in workload.tables
        ]
        self.layer = keras.Sequential(self._embeddings)
        for one in self._embeddings:
            one.build()
        self.layer.built = True
        self.optimizer = keras_optimizer(optimizer)
        self._width = max(
            int(np.diff(ids.splits).max())
            for batch in workload.batches
            for ids in batch.ids
        )

    def _padded(self, ids: Ids, values: np.ndarray) -> np.ndarray:
        padded = np.zeros((len(ids.splits) - 1, self._width), values.dtype)
        padded[ids.bag, ids.column] = values
        return padded

    def ids_of(self, ids: Ids, is_bag: bool) -> Any:
        return tf.constant(
            self._padded(ids, ids.values) if is_bag else ids.values
        )

    def weights_of(self, ids: Ids) -> Any:
        weights = ids.weights
        if weights is None:
            weights = np.ones(len(ids.values), np.float32)
        return tf.constant(self._padded(ids, weights))

    def call_layer(self, ids: Any, weights: Any, training: bool) -> Any:
        outputs = {}
        for feature in self.workload.features:
            name = feature.name
            rows = self._embeddings[feature.table](ids[name])
            if feature.is_bag:
                rows = self._reduce(rows, weights[name])
            outputs[name] = rows
        return outputs

    def _reduce(self, rows: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        total = tf.einsum("bld,bl->bd", rows, weights)
        if self.workload.combiner == "sum":
            return total
        if self.workload.combiner == "mean":
            size = tf.reduce_sum(weights, 1, keepdims=True)
        else:
            size = tf.sqrt(tf.reduce_sum(weights**2, 1, keepdims=True))
        return tf.math.divide_no_nan(total, size)

    def set_tables(self, values: Sequence[np.ndarray]) -> None:
        for one, value in zip(self._embeddings, values, strict=True):
            one.embeddings.assign(value)

    def get_tables(self) -> list[np.ndarray]:
        return [np.array(one.embeddings) for one in self._embeddings]


class LookupSparse(TensorFlowContender):
    """`tf.nn.embedding_lookup_sparse`, a tape, and TensorFlow's sparse updates.

    Repeated ids are summed before the update, as exact optimizers need it.
    """

    title = "tf.nn.embedding_lookup_sparse"

    def __init__(self, workload: Workload, optimizer: str) -> None:
        super().__init__(workload)
        self._optimizer = optimizer
        self._tables = [
            tf.Variable(tf.random.uniform([rows, workload.dim], -0.05, 0.05))
            for rows in workload.tables
        ]
        self._slots = [
            [
                tf.Variable(tf.fill(table.shape, first))
                for first in FIRST_SLOTS[optimizer]
            ]
            for table in self._tables
        ]
        self._taken = tf.Variable(0.0)

    def ids_of(self, ids: Ids, is_bag: bool) -> Any:
        return self._sparse(ids, ids.values)

    def weights_of(self, ids: Ids) -> Any:
        return None if ids.weights is None else self._sparse(ids, ids.weights)

    def _sparse(self, ids: Ids, values: np.ndarray) -> tf.SparseTensor:
        longest = int(np.diff(ids.splits).max())
        shape = [len(ids.splits) - 1, longest]
        return tf.SparseTensor(
            np.stack([ids.bag, ids.column], 1), values, shape
        )

    def outputs(
        self, ids: Any, weights: Any, training: bool
    ) -> list[tf.Tensor]:
        parts = []
        for feature in self.workload.features:
            part = tf.nn.embedding_lookup_sparse(
                self._tables[feature.table],
                ids[feature.name],
                weights.get(feature.name),
                combiner=self.workload.combiner,
            )
            # It leaves out empty examples at the end.
            missing = self.workload.batch_size - tf.shape(part)[0]
            parts.append(tf.pad(part, [[0, missing], [0, 0]]))
        return parts

    def step(
        self, ids: Any, weights: Any, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            outputs = self.outputs(ids, weights, True)
        found = tape.gradient(outputs, self._tables, output_gradients=gradients)
        self._taken.assign_add(1.0)
        for table, slots, one in zip(
            self._tables, self._slots, found, strict=True
        ):
            unique_ids, place = tf.unique(one.indices)
            count = tf.size(unique_ids)
            total = tf.math.unsorted_segment_sum(one.values, place, count)
            self._update(table, slots, unique_ids, total)
        return outputs

    def _update(
        self,
        table: tf.Variable,
        slots: list[tf.Variable],
        ids: tf.Tensor,
        gradient: tf.Tensor,
    ) -> None:
        rate, ops = tf.constant(LEARNING_RATE), tf.raw_ops
        slot = [one.handle for one in slots]
        given = {"var": table.handle, "grad": gradient, "indices": ids}
        if self._optimizer == "sgd":
            ops.ResourceScatterSub(
                resource=table.handle, indices=ids, updates=rate * gradient
            )
        elif self._optimizer == "adagrad":
            ops.ResourceSparseApplyAdagradV2(
                accum=slot[0], lr=rate, epsilon=tf.constant(1e-7), **given
            )
        elif self._optimizer == "ftrl":
            zero = tf.constant(0.0)
            ops.ResourceSparseApplyFtrlV2(
                accum=slot[0],
                linear=slot[1],
                lr=rate,
                l1=zero,
                l2=zero,
                l2_shrinkage=zero,
                lr_power=tf.constant(-0.5),
                **given,
            )
        else:
            self._adam(table, slots, ids, gradient)

    def _adam(
        self,
        table: tf.Variable,
        slots: list[tf.Variable],
        ids: tf.Tensor,
        gradient: tf.Tensor,
    ) -> None:
        t = self._taken
        alpha = LEARNING_RATE * tf.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        old = [tf.gather(one, ids) for one in slots]
        m = 0.9 * old[0] + 0.1 * gradient
        v = 0.999 * old[1] + 0.001 * gradient * gradient
        move = alpha * m / (tf.sqrt(v) + 1e-7)
        for one, value in zip(slots, (m, v), strict=True):
            one.scatter_update(tf.IndexedSlices(value, ids))
        table.scatter_sub(tf.IndexedSlices(move, ids))

    def set_tables(self, values: Sequence[np.ndarray]) -> None:
        for table, value in zip(self._tables, values, strict=True):
            table.assign(value)

    def get_tables(self) -> list[np.ndarray]:
        return [table.numpy() for table in self._tables]
