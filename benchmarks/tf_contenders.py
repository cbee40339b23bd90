"""Contenders that are Keras layers or TensorFlow functions, ours included."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_distembed as tde
from benchmarks.contender import LEARNING_RATE, Contender
from benchmarks.workloads import Batch, Ids, Workload


def keras_optimizer(name: str) -> keras.optimizers.Optimizer:
    """The same settings for all: Keras' own, and one learning rate."""
    kind = {
        "sgd": keras.optimizers.SGD,
        "adagrad": keras.optimizers.Adagrad,
        "adam": keras.optimizers.Adam,
        "ftrl": keras.optimizers.Ftrl,
    }[name]
    return kind(LEARNING_RATE)


def ragged(ids: Ids, values: np.ndarray) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_splits(values, ids.splits, validate=False)


class TensorFlowContender(Contender):
    """Runs a lookup, and a step with it, as compiled functions.

    Each function has one trace for batches of any length.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._forward: Any = None
        self._train: Any = None

    @abc.abstractmethod
    def outputs(
        self, ids: Any, weights: Any, training: bool
    ) -> list[tf.Tensor]:
        """For each feature `[B, D]`, of what `inputs_of` gave."""

    @abc.abstractmethod
    def step(
        self, ids: Any, weights: Any, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Traced: looks up and applies the gradients of the outputs.

        It returns the outputs. Without, TensorFlow would not compute them.
        """

    def ids_of(self, ids: Ids, is_bag: bool) -> Any:
        """Ids `[B]` or ragged, as users have them: int64."""
        return ragged(ids, ids.values) if is_bag else tf.constant(ids.values)

    def weights_of(self, ids: Ids) -> Any:
        if ids.weights is None:
            return None
        return ragged(ids, ids.weights)

    def inputs_of(self, batch: Batch) -> Any:
        features = self.workload.features
        ids = {
            feature.name: self.ids_of(one, feature.is_bag)
            for feature, one in zip(features, batch.ids, strict=True)
        }
        weights = {
            feature.name: given
            for feature, one in zip(features, batch.ids, strict=True)
            if (given := self.weights_of(one)) is not None
        }
        return ids, weights, [tf.constant(one) for one in batch.gradients]

    def forward(self, inputs: Any) -> Any:
        ids, weights, _ = inputs
        if self._forward is None:
            self._forward = _flat_function(
                lambda ids, weights: self.outputs(ids, weights, False),
                (ids, weights),
            )
        return self._forward(*_components((ids, weights)))

    def train(self, inputs: Any) -> None:
        if self._train is None:
            self._train = _flat_function(self.step, inputs)
        self._train(*_components(inputs))

    def calls(self, *, training: bool) -> Callable[[], None]:
        """As of any contender; inputs are taken apart once."""
        batches = [self.inputs_of(b) for b in self.workload.batches]
        # Traces.
        (self.train if training else self.forward)(batches[0])
        run = self._train if training else self._forward
        flat = [_components(one if training else one[:2]) for one in batches]
        turn = 0

        def call() -> None:
            nonlocal turn
            run(*flat[turn])
            turn = (turn + 1) % len(flat)

        return call

    @property
    def traces(self) -> int:
        """Graphs made for training."""
        return self._train.experimental_get_tracing_count()


class LayerContender(TensorFlowContender):
    """A Keras layer, differentiated by a tape and trained by an optimizer."""

    layer: Any
    optimizer: keras.optimizers.Optimizer

    def outputs(
        self, ids: Any, weights: Any, training: bool
    ) -> list[tf.Tensor]:
        outputs = self.call_layer(ids, weights, training)
        return [outputs[f.name] for f in self.workload.features]

    def call_layer(self, ids: Any, weights: Any, training: bool) -> Any:
        given = {} if not self.workload.weighted else {"weights": weights}
        return self.layer(ids, training=training, **given)

    def step(
        self, ids: Any, weights: Any, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            outputs = self.outputs(ids, weights, True)
        variables = self.layer.trainable_variables
        found = tape.gradient(outputs, variables, output_gradients=gradients)
        self.optimizer.apply(found, variables)
        return outputs

    def inputs_of(self, batch: Batch) -> Any:
        inputs = super().inputs_of(batch)
        if not self.optimizer.built:
            if not self.layer.built:
                self.outputs(*inputs[:2], False)
            self.optimizer.build(self.layer.trainable_variables)
        return inputs


class Ours(LayerContender):
    """`tf_distembed.DistributedEmbedding`."""

    title = "tf_distembed"

    def __init__(self, workload: Workload, optimizer: str) -> None:
        super().__init__(workload)
        tables = [
            tde.TableConfig(
                f"t{i}",
                rows,
                workload.dim,
                optimizer=keras.optimizers.serialize(
                    keras_optimizer(optimizer)
                ),
                combiner=workload.combiner,
            )
            for i, rows in enumerate(workload.tables)
        ]
        self.layer = tde.DistributedEmbedding(
            {
                f.name: tde.FeatureConfig(f.name, tables[f.table])
                for f in workload.features
            }
        )
        # The model's optimizer, for weights that are no tables.
        self.optimizer = keras.optimizers.SGD(LEARNING_RATE)

    def set_tables(self, values: Sequence[np.ndarray]) -> None:
        self.layer.set_embedding_tables(
            {f"t{i}": value for i, value in enumerate(values)}
        )

    def get_tables(self) -> list[np.ndarray]:
        tables = self.layer.get_embedding_tables()
        return [tables[f"t{i}"].numpy() for i in range(len(tables))]


def _components(inputs: Any) -> list[tf.Tensor]:
    return tf.nest.flatten(inputs, expand_composites=True)


def _flat_function(function: Callable[..., Any], inputs: Any) -> Any:
    """A compiled function of the components of `inputs`.

    A batch of 26 features takes longer to take apart in Python than to look
    up on some machines. A program whose step reads its batch from an iterator
    does not do that either.
    """
    specs = _specs(inputs)

    def flat(*components: tf.Tensor) -> Any:
        return function(
            *tf.nest.pack_sequence_as(specs, components, expand_composites=True)
        )

    return tf.function(
        flat, input_signature=tf.nest.flatten(specs, expand_composites=True)
    )


def _specs(inputs: Any) -> Any:
    """Specs that leave the number of ids, not the batch size, open."""

    def spec(one: Any) -> Any:
        if isinstance(one, tf.RaggedTensor):
            return tf.RaggedTensorSpec(
                [one.shape[0], None], one.dtype, 1, one.row_splits.dtype
            )
        if isinstance(one, tf.SparseTensor):
            return tf.SparseTensorSpec([one.shape[0], None], one.dtype)
        return tf.TensorSpec(one.shape, one.dtype)

    return tf.nest.map_structure(spec, inputs)
