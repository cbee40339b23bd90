"""Keras models on the emulator train as on one CPU."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde

api = tf.tpu.experimental.embedding

ROWS, WIDTH = 50, 8


class Lookup(keras.layers.Layer):
    """The least layer on TPUEmbeddingV2; the update comes with the gradient.

    Its gradient is taken with respect to `trap`, a variable that the output
    does not depend on; taking it updates the tables.
    """

    def __init__(self, batch: int) -> None:
        super().__init__()
        table = api.TableConfig(
            ROWS,
            WIDTH,
            combiner="sum",
            name="table",
            initializer=tf.constant_initializer(0.5),
        )
        self._embedding = api.TPUEmbeddingV2(
            api.FeatureConfig(table, output_shape=[batch]), api.SGD(0.5)
        )
        self.trap = self.add_weight(shape=(), initializer="zeros")

    def compute_output_shape(self, input_shape):
        return (input_shape[0], WIDTH)

    def call(self, ids):
        embedding = self._embedding

        @tf.custom_gradient
        def lookup(trap):
            activations, lookups = embedding(ids)

            def gradient(upstream):
                embedding.apply_gradients(upstream, lookups)
                return tf.zeros_like(trap)

            return activations, gradient

        return lookup(tf.convert_to_tensor(self.trap.value))


def dense_model(**settings) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.02),
        "mse",
        metrics=["mae"],
        jit_compile=False,
        **settings,
    )
    return model


def dense_data() -> tuple[np.ndarray, np.ndarray]:
    """21 rows: in batches of 8 the last is short."""
    x = np.random.default_rng(0).normal(size=(21, 6)).astype("float32")
    return x, x[:, :1] * 2 - x[:, 1:2]


def test_dense_model_trains_as_on_one_cpu() -> None:
    x, y = dense_data()

    def train(model: keras.Model) -> dict[str, list[float]]:
        return model.fit(
            x, y, batch_size=8, epochs=2, shuffle=False, verbose=0
        ).history

    expected = train(dense_model())
    with tde.testing.sparsecore_emulator() as strategy:
        with strategy.scope():
            model = dense_model()
        got = train(model)
    for name, losses in expected.items():
        np.testing.assert_allclose(got[name], losses, rtol=1e-5)


def test_dense_model_trains_as_on_two_mirrored_cpus(mirrored) -> None:
    """Also where the chips get different rows of the short last batch."""
    x, y = dense_data()

    def train(model: keras.Model) -> tuple:
        history = model.fit(
            x, y, batch_size=8, shuffle=False, verbose=0
        ).history
        return history, model.predict(x[:13], batch_size=8, verbose=0)

    with mirrored.scope():
        model = dense_model()
    expected = train(model)
    with tde.testing.sparsecore_emulator(2) as strategy:
        with strategy.scope():
            model = dense_model(steps_per_execution=2)
        got = train(model)
    for name, losses in expected[0].items():
        np.testing.assert_allclose(got[0][name], losses, rtol=1e-5)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-4, atol=1e-5)
    for weight in model.trainable_variables:
        first, second = weight.value.values
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("chips", [1, 2])
def test_layer_on_tpu_embedding_trains_as_an_embedding(chips: int) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, ROWS, 64).astype("int32")
    y = (ids % 7).astype("float32")[:, np.newaxis]
    data = tf.data.Dataset.from_tensor_slices((ids, y))
    data = data.batch(16, drop_remainder=True)

    def model(lookup: keras.layers.Layer) -> keras.Model:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((), dtype="int32")
        outputs = keras.layers.Dense(1)(lookup(inputs))
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
        return model

    # The same by hand: TPUEmbeddingV2 steps by 0.5, the model by 0.05.
    plain = keras.layers.Embedding(
        ROWS, WIDTH, embeddings_initializer=keras.initializers.Constant(0.5)
    )
    reference = model(plain)
    losses = []
    for batch_ids, batch_y in 2 * list(data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((reference(batch_ids) - batch_y) ** 2)
        variables = reference.trainable_variables
        for variable, gradient in zip(
            variables, tape.gradient(loss, variables), strict=True
        ):
            rate = 0.5 if variable is plain.embeddings else 0.05
            variable.assign(variable - rate * tf.convert_to_tensor(gradient))
        losses.append(float(loss))
    with tde.testing.sparsecore_emulator(chips) as strategy:
        with strategy.scope():
            emulated = model(Lookup(16 // chips))
        history = emulated.fit(data, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(
        history.history["loss"],
        [np.mean(losses[:4]), np.mean(losses[4:])],
        rtol=1e-4,
    )
