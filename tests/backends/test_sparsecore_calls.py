"""How a layer on SparseCores is called, and what it refuses."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests.backends.emulated import (
    ROWS,
    coded,
    eight,
    emulated,
    lookup,
    table,
    train,
)

# -- 1. called once a step; the update comes with the gradient ---------------


def test_the_update_comes_with_the_gradient_and_applying_adds_nothing():
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(optimizer="sgd"))
        )
        optimizer = keras.optimizers.SGD(1.0)
        before = None

        @tf.function
        def step(inputs, apply):
            def replica(inputs):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(layer(inputs, training=True))
                variables = layer.trainable_variables
                gradients = tape.gradient(loss, variables)
                if apply:
                    optimizer.apply(gradients, variables)

            strategy.run(replica, args=(inputs,))

        inputs = eight([3, 3], [5])
        moves = []
        for apply in (False, True):
            lookup(strategy, layer, inputs)
            before = layer.get_embedding_tables()["item"].numpy()
            step(inputs, apply)
            moves.append(before - layer.get_embedding_tables()["item"].numpy())
        expected = np.zeros((40, 4), np.float32)
        expected[3], expected[5] = 2 * 0.01, 0.01
        for move in moves:
            np.testing.assert_allclose(move, expected, atol=2e-5)
        assert layer.get_optimizer_state()["item"]["step"] == 2


def test_a_second_gradient_of_a_call_raises():
    """It would be a second step."""
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(tde.FeatureConfig("item", table()))

        @tf.function
        def step(inputs):
            def replica(inputs):
                with tf.GradientTape(persistent=True) as tape:
                    loss = tf.reduce_sum(layer(inputs, training=True))
                for _ in range(2):
                    tape.gradient(loss, layer.trainable_variables)

            strategy.run(replica, args=(inputs,))

        with pytest.raises(ValueError, match="gradient of a call was computed"):
            step(eight([3, 3], [5]))
        np.testing.assert_array_equal(
            layer.get_embedding_tables()["item"], coded(40, 4)
        )


@pytest.mark.parametrize("placed", ["sparsecore", "default_device"])
def test_preprocessed_inputs_pass_through_a_strategy(placed):
    ids = {"sparsecore": eight([3, 3], [], [5]), "default_device": tf.range(8)}
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(placement=placed))
        )
        preprocessed = layer.preprocess(ids[placed])
        (found,) = lookup(strategy, layer, preprocessed)
        (expected,) = lookup(strategy, layer, ids[placed])
        np.testing.assert_array_equal(found, expected)
        assert found.any()


def test_a_second_call_in_a_step_raises():
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(tde.FeatureConfig("item", table()))

        @tf.function
        def step(inputs):
            def replica(inputs):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(layer(inputs)) + tf.reduce_sum(
                        layer(inputs)
                    )
                return tape.gradient(loss, layer.trainable_variables)

            return strategy.run(replica, args=(inputs,))

        with pytest.raises(ValueError, match="features of one layer"):
            step(eight([3]))


# -- 2. no gradient reaches weights ------------------------------------------


def test_learned_weights_raise_and_stopped_ones_are_used():
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(tde.FeatureConfig("item", table()))
        scale = tf.Variable(2.0)

        @tf.function
        def step(inputs, stop):
            def replica(inputs):
                with tf.GradientTape() as tape:
                    weights = tf.cast(inputs, tf.float32) * 0 + scale
                    if stop:
                        weights = tf.stop_gradient(weights)
                    output = layer(inputs, weights)
                    loss = tf.reduce_sum(output)
                return output, tape.gradient(loss, layer.trainable_variables)

            return strategy.run(replica, args=(inputs,))

        inputs = tf.range(ROWS)[:, None]
        with pytest.raises(ValueError, match="no gradient reaches the weights"):
            step(inputs, False)
        output, _ = step(inputs, True)
        np.testing.assert_allclose(output[3], 2 * coded(40, 4)[3], rtol=1e-6)


# -- 3. inside strategy.run, in a function -----------------------------------


def test_outside_of_a_replica_it_raises_with_the_pattern():
    with emulated():
        layer = tde.DistributedEmbedding(tde.FeatureConfig("item", table()))
        with pytest.raises(RuntimeError, match=r"strategy\.run"):
            layer(tf.range(ROWS))


def test_after_the_emulator_is_left_it_refuses_to_run():
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(), (ROWS, 3))
        )
    with pytest.raises(RuntimeError):
        lookup(strategy, layer, eight([1]))


# -- 6. what SparseCores cannot do -------------------------------------------


@pytest.mark.parametrize(
    "optimizer, named",
    [
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), "momentum"),
        (
            lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
            "'nesterov': True",
        ),
        (
            lambda: keras.optimizers.Ftrl(
                l2_shrinkage_regularization_strength=0.1
            ),
            "l2_shrinkage",
        ),
        (lambda: None, "own optimizer"),
    ],
)
def test_optimizers_it_cannot_do_raise_and_auto_places_nothing_elsewhere(
    optimizer, named
):
    with emulated(), pytest.raises(ValueError, match=named) as raised:
        tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(optimizer=optimizer()))
        )
    assert "'item'" in str(raised.value)
    assert "sparsecore" in str(raised.value)


def test_a_frozen_table_does_not_move():
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            [
                tde.FeatureConfig("a", table("a", trainable=False)),
                tde.FeatureConfig("b", table("b", optimizer="adam")),
            ]
        )
        train(strategy, layer, [tf.range(ROWS), tf.range(ROWS)], 2)
        tables = layer.get_embedding_tables()
        np.testing.assert_array_equal(tables["a"], coded(40, 4))
        assert (tables["b"].numpy()[:ROWS] != coded(40, 4)[:ROWS]).all()
        assert set(layer.get_optimizer_state()) == {"b"}


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        lambda: keras.optimizers.SGD(loss_scale_factor=8.0),
        lambda: keras.optimizers.SGD(use_ema=True),
        lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
    ],
)
def test_optimizers_of_the_model_that_cannot_reach_the_tables_raise(optimizer):
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(), (ROWS,))
        )
        model_optimizer = optimizer()

        @tf.function
        def call(inputs):
            def step(inputs):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(layer(inputs))
                variables = layer.trainable_variables
                model_optimizer.apply(tape.gradient(loss, variables), variables)

            strategy.run(step, args=(inputs,))

        with pytest.raises(ValueError, match="sparsecore"):
            call(tf.range(ROWS))
        np.testing.assert_array_equal(
            layer.get_embedding_tables()["item"], coded(40, 4)
        )
