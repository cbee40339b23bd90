"""TensorFlow Recommenders' layer. It needs TF_USE_LEGACY_KERAS=1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
import tf_keras

from benchmarks.contender import LEARNING_RATE
from benchmarks.tf_contenders import TensorFlowContender
from benchmarks.workloads import Workload


class Recommenders(TensorFlowContender):
    """`tfrs.layers.embedding.TPUEmbedding` on a CPU, unweighted.

    There its tables are ordinary weights, which the tf_keras optimizer trains.
    """

    title = "TFRS"

    def __init__(self, workload: Workload, optimizer: str) -> None:
        super().__init__(workload)
        embedding = tf.tpu.experimental.embedding
        tables = [
            embedding.TableConfig(
                rows, workload.dim, combiner=workload.combiner, name=f"t{i}"
            )
            for i, rows in enumerate(workload.tables)
        ]
        self._layer = tfrs.layers.embedding.TPUEmbedding(
            {
                f.name: embedding.FeatureConfig(tables[f.table], name=f.name)
                for f in workload.features
            },
            optimizer=None,
        )
        self._layer.build(None)
        kind = {
            "sgd": tf_keras.optimizers.SGD,
            "adagrad": tf_keras.optimizers.Adagrad,
            "adam": tf_keras.optimizers.Adam,
            "ftrl": tf_keras.optimizers.Ftrl,
        }[optimizer]
        # Unlike Keras 3, its Adam and others have a jit of their own.
        self._optimizer = kind(LEARNING_RATE, jit_compile=False)
        self._optimizer.build(self._variables())

    def _variables(self) -> list[tf.Variable]:
        found = {v.name.split(":")[0]: v for v in self._layer.variables}
        return [found[f"t{i}"] for i in range(len(self.workload.tables))]

    def outputs(
        self, ids: Any, weights: Any, training: bool
    ) -> list[tf.Tensor]:
        outputs = self._layer(ids)
        return [outputs[f.name] for f in self.workload.features]

    def step(
        self, ids: Any, weights: Any, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        variables = self._variables()
        with tf.GradientTape() as tape:
            outputs = self.outputs(ids, weights, True)
        found = tape.gradient(outputs, variables, output_gradients=gradients)
        self._optimizer.apply_gradients(zip(found, variables, strict=True))
        return outputs

    def set_tables(self, values: Sequence[np.ndarray]) -> None:
        for variable, value in zip(self._variables(), values, strict=True):
            variable.assign(value)

    def get_tables(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self._variables()]
