"""Layers on an emulated TPU: how these tests make and call them."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

import tf_distembed as tde
from tests.unoptimized import unoptimized

ROWS = 8


def coded(rows: int, dim: int) -> np.ndarray:
    """Values that tell row and column."""
    return (np.arange(rows)[:, None] + np.arange(dim) / 16).astype("float32")


def table(name: str = "item", dim: int = 4, **settings: Any) -> tde.TableConfig:
    settings = {"optimizer": "adagrad", "combiner": "sum", **settings}
    rows = settings.pop("rows", 40)
    if "initializer" not in settings:
        settings["initializer"] = coded(rows, dim)
    return tde.TableConfig(name, rows, dim, **settings)


@contextlib.contextmanager
def emulated(chips: int = 1, cores: int = 2):
    with (
        unoptimized(),
        tde.testing.sparsecore_emulator(chips, cores) as strategy,
        strategy.scope(),
    ):
        yield strategy


def ragged(*rows: list[int]) -> tf.RaggedTensor:
    lengths = [len(row) for row in rows]
    flat = [value for row in rows for value in row]
    return tf.RaggedTensor.from_row_lengths(
        tf.constant(flat, tf.int64), lengths
    )


def eight(*rows: list[int]) -> tf.RaggedTensor:
    return ragged(*rows, *[[]] * (ROWS - len(rows)))


def lookup(strategy: Any, layer: Any, inputs: Any, weights: Any = None) -> Any:
    """What one replica, or each of several, gets for its part."""

    @tf.function
    def call(inputs, weights):
        return strategy.run(layer, args=(inputs,), kwargs={"weights": weights})

    return tf.nest.map_structure(
        lambda x: [
            np.asarray(v) for v in strategy.experimental_local_results(x)
        ],
        call(inputs, weights),
    )


def train(
    strategy: Any,
    layer: Any,
    inputs: Any,
    steps: int = 1,
    optimizer: Any = None,
) -> None:
    """Takes steps on the loss sum(outputs * 0.5)."""

    @tf.function
    def call(inputs):
        def step(inputs):
            with tf.GradientTape() as tape:
                outputs = tf.nest.flatten(layer(inputs, training=True))
                loss = tf.add_n([tf.reduce_sum(x) * 0.5 for x in outputs])
            variables = layer.trainable_variables
            gradients = tape.gradient(loss, variables)
            if optimizer is not None:
                optimizer.apply(gradients, variables)

        strategy.run(step, args=(inputs,))

    for _ in range(steps):
        call(inputs)
