"""A training loop of one's own, as Keras-RS documents it for TPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests.backends.emulated import coded, emulated

ITERATIONS, BATCH = 3, 8


def layer() -> tde.DistributedEmbedding:
    item = tde.TableConfig(
        "item", 30, 4, optimizer="adam", combiner="mean",
        initializer=coded(30, 4) / 30,
    )  # fmt: skip
    user = tde.TableConfig(
        "user", 12, 4, optimizer="adagrad", combiner="sum",
        initializer=coded(12, 4) / 12,
    )  # fmt: skip
    return tde.DistributedEmbedding(
        {
            "seen": tde.FeatureConfig("seen", item, (BATCH, 4)),
            "next": tde.FeatureConfig("next", item, (BATCH,)),
            "user": tde.FeatureConfig("user", user, (BATCH, 2)),
        }
    )


def dataset() -> tf.data.Dataset:
    """((inputs, weights), labels): ragged, dense and sparse inputs."""
    draw = np.random.default_rng(5)
    rows = ITERATIONS * BATCH
    lengths = draw.integers(0, 5, rows)
    seen = tf.RaggedTensor.from_row_lengths(
        draw.integers(0, 30, lengths.sum()), lengths
    )
    pairs = tf.constant(draw.integers(1, 12, (rows, 2)))
    weights = tf.ragged.map_flat_values(
        lambda ids: tf.cast(ids % 3, tf.float32) - 0.5, seen
    )
    return tf.data.Dataset.from_tensor_slices(
        (
            (
                {
                    "seen": seen,
                    "next": draw.integers(0, 30, rows),
                    "user": tf.sparse.from_dense(pairs),
                },
                weights,
            ),
            draw.normal(size=(rows, 4)).astype("float32"),
        )
    ).batch(BATCH, drop_remainder=True)


def loss_of(outputs: dict[str, tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum((tf.add_n(list(outputs.values())) - labels) ** 2)


def loop(
    strategy: tf.distribute.Strategy,
    embedding: tde.DistributedEmbedding,
    use: Callable[[Any, Any], None],
) -> Callable[..., Any]:
    """The loop; `use` gets the gradients and the variables."""

    def step(inputs_and_weights, labels):
        inputs, weights = inputs_and_weights
        weights = {"seen": weights, "next": None, "user": None}
        with tf.GradientTape() as tape:
            outputs = embedding(inputs, weights)
            loss = loss_of(outputs, labels)
        variables = embedding.trainable_variables
        use(tape.gradient(loss, variables), variables)
        return outputs

    @tf.function
    def train(iterator, count):
        outputs = strategy.run(step, args=next(iterator))
        for _ in tf.range(count - 1):
            outputs = strategy.run(step, args=next(iterator))
        return outputs

    return train


def by_hand() -> tuple[dict, dict, dict]:
    """One optimizer step an iteration on one device, and the last outputs."""
    embedding = layer()
    optimizer = keras.optimizers.SGD(1.0)
    variables = embedding.trainable_variables
    for (inputs, weights), labels in dataset():
        with tf.GradientTape() as tape:
            outputs = embedding(
                inputs, {"seen": weights, "next": None, "user": None}
            )
            loss = loss_of(outputs, labels)
        optimizer.apply(tape.gradient(loss, variables), variables)
    return (
        embedding.get_embedding_tables(),
        embedding.get_optimizer_state(),
        outputs,
    )


@pytest.fixture(scope="module")
def expected() -> tuple[dict, dict, dict]:
    return by_hand()


def compare(found: tde.DistributedEmbedding, outputs: Any, expected) -> None:
    tables, state, last = expected
    for name, value in found.get_embedding_tables().items():
        np.testing.assert_allclose(value, tables[name], 2e-5, 2e-5)
    for name, slots in found.get_optimizer_state().items():
        for slot, value in slots.items():
            np.testing.assert_allclose(value, state[name][slot], 2e-5, 2e-5)
    for name, value in outputs.items():
        np.testing.assert_allclose(value, last[name], 2e-5, 2e-5)


@pytest.mark.parametrize("chips", [1, 2])
@pytest.mark.parametrize("applied", [False, True])
def test_the_loop_takes_one_step_an_iteration(chips, applied, expected):
    """Whether or not the gradients are given to an optimizer as well."""
    with emulated(chips) as strategy:
        embedding = layer()
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(embedding.trainable_variables)

        def use(gradients, variables):
            assert all(gradient is not None for gradient in gradients)
            if applied:
                optimizer.apply_gradients(
                    zip(gradients, variables, strict=True)
                )

        distributed = tde.distribute_dataset(dataset(), strategy)
        outputs = loop(strategy, embedding, use)(
            iter(distributed), tf.constant(ITERATIONS)
        )
        joined = {
            name: np.concatenate(strategy.experimental_local_results(value))
            for name, value in outputs.items()
        }
        compare(embedding, joined, expected)
        assert embedding.get_optimizer_state()["item"]["step"] == ITERATIONS


def test_the_same_loop_trains_the_tables_of_the_default_device(expected):
    strategy = tf.distribute.get_strategy()
    embedding = layer()
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(embedding.trainable_variables)

    def use(gradients, variables):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    outputs = loop(strategy, embedding, use)(
        iter(dataset()), tf.constant(ITERATIONS)
    )
    compare(embedding, outputs, expected)
