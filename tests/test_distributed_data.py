"""distribute_dataset: to Keras, and to loops of one's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests import training_setup as setup

GLOBAL = 16
ROWS = 3 * GLOBAL


@functools.cache
def fitted(kind: str) -> dict[str, Any]:
    """What Keras' fit, evaluate and predict give on the default device."""
    keras.utils.set_random_seed(3)
    model = setup.model(GLOBAL)
    data = setup.dataset(ROWS, GLOBAL, kind)
    history = model.fit(data, epochs=2, verbose=0).history
    return {
        "loss": history["loss"],
        "mae": history["mae"],
        "evaluate": model.evaluate(data, verbose=0),
        "predict": model.predict(data, verbose=0),
        **setup.state(model.embedding),
    }


def fit_on(
    strategy: tf.distribute.Strategy, kind: str, distribute: bool
) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = setup.model(GLOBAL)

    def data() -> Any:
        batches = setup.dataset(ROWS, GLOBAL, kind)
        return (
            tde.distribute_dataset(batches, strategy) if distribute else batches
        )

    history = model.fit(data(), epochs=2, verbose=0).history
    return {
        "loss": history["loss"],
        "mae": history["mae"],
        "evaluate": model.evaluate(data(), verbose=0),
        "predict": model.predict(data(), verbose=0),
        **setup.state(model.embedding),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "chips,kind,distribute",
    [
        (2, "ragged", True),
        (1, "sparse", True),
        (4, "dense", False),
    ],
)
def test_keras_on_the_emulator_gives_what_one_device_gives(
    chips: int, kind: str, distribute: bool
) -> None:
    with tde.testing.sparsecore_emulator(chips) as strategy:
        got = fit_on(strategy, kind, distribute)
    setup.assert_close(got, fitted(kind))


def loop(
    strategy: tf.distribute.Strategy, data: Any, optimizer: Any, seed: int = 3
) -> tuple[tde.DistributedEmbedding, list[np.ndarray], Callable]:
    """The pattern of a loop of one's own, on a layer without a model."""
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        layer = setup.layer(GLOBAL)
        loss_fn = keras.losses.MeanSquaredError(reduction="sum")
        if optimizer is not None:
            optimizer.build(layer.trainable_variables)

    @tf.function
    def train(iterator: Iterator[Any], steps: tf.Tensor) -> Any:
        def step(batch: Any) -> Any:
            (inputs, weights), labels = batch
            with tf.GradientTape() as tape:
                outputs = layer(inputs, weights, training=True)
                loss = sum(loss_fn(labels, one) for one in outputs.values())
            variables = layer.trainable_variables
            gradients = tape.gradient(loss, variables)
            if optimizer is not None:
                optimizer.apply_gradients(
                    zip(gradients, variables, strict=True)
                )
            return outputs

        outputs = strategy.run(step, args=(next(iterator),))
        for _ in tf.range(steps - 1):
            # On several CPUs or GPUs: what replicas exchange in one iteration
            # must not meet what they exchange in the next.
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            outputs = strategy.run(step, args=(next(iterator),))
        return outputs

    outputs = train(iter(data), tf.constant(3))
    return (
        layer,
        [
            np.concatenate(
                [
                    part.numpy()
                    for part in strategy.experimental_local_results(outputs[k])
                ]
            )
            for k in outputs
        ],
        train,
    )


@functools.cache
def looped() -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """The loop on the default device, applying with SGD."""
    strategy = tf.distribute.get_strategy()
    data = tde.distribute_dataset(setup.dataset(ROWS, GLOBAL))
    assert isinstance(data, tf.data.Dataset)
    layer, outputs, _ = loop(strategy, data, keras.optimizers.SGD(1.0))
    return setup.state(layer), outputs


@pytest.mark.slow
@pytest.mark.parametrize("applies", [False, True], ids=["alone", "applied"])
def test_a_loop_of_ones_own_on_the_emulator(applies: bool) -> None:
    """The gradient moves the tables; applying it adds nothing."""
    with tde.testing.sparsecore_emulator(2) as strategy:
        with strategy.scope():
            optimizer = keras.optimizers.SGD(1.0) if applies else None
            before = setup.state(setup.layer(GLOBAL))
        data = tde.distribute_dataset(setup.dataset(ROWS, GLOBAL), strategy)
        layer, outputs, train = loop(strategy, data, optimizer)
        got = setup.state(layer)
        assert train.experimental_get_tracing_count() == 1
    expected, expected_outputs = looped()
    setup.assert_close(got, expected)
    setup.assert_moved(got, before)
    for one, other in zip(outputs, expected_outputs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_a_loop_of_ones_own_on_two_mirrored_replicas(mirrored) -> None:
    with mirrored.scope():
        optimizer = keras.optimizers.SGD(1.0)
    data = tde.distribute_dataset(setup.dataset(ROWS, GLOBAL), mirrored)
    layer, outputs, _ = loop(mirrored, data, optimizer)
    expected, expected_outputs = looped()
    setup.assert_close(setup.state(layer), expected)
    for one, other in zip(outputs, expected_outputs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize(
    "structure",
    [
        lambda x, y: x[0]["seen"],
        lambda x, y: x,
        lambda x, y: (x[0], y),
        lambda x, y: (x[0]["next"], y, tf.ones_like(y)),
        lambda x, y: (x, y),
    ],
    ids=["ids", "x", "x_y", "x_y_weights", "inputs_weights_y"],
)
def test_elements_keep_their_structure_and_order(mirrored, structure) -> None:
    batches = setup.dataset(10, 4, drop_remainder=False).map(structure)
    found = list(tde.distribute_dataset(batches, mirrored))
    expected = list(batches)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        tf.nest.assert_same_structure(
            tf.nest.map_structure(lambda _: 0, one),
            tf.nest.map_structure(lambda _: 0, other),
        )
        for leaf, whole in zip(
            tf.nest.flatten(one), tf.nest.flatten(other), strict=True
        ):
            parts = mirrored.experimental_local_results(leaf)
            rows = [
                row
                for part in parts
                for row in (
                    part.to_list()
                    if isinstance(part, tf.RaggedTensor)
                    else part.numpy().tolist()
                )
            ]
            if isinstance(whole, tf.RaggedTensor):
                assert rows == whole.to_list()
            else:
                assert rows == whole.numpy().tolist()


def test_a_replica_may_get_no_row_of_a_sparse_batch(mirrored) -> None:
    rows = 2 * 8 + 1
    batches = setup.dataset(rows, 8, "sparse", drop_remainder=False)
    seen = batches.map(lambda x, y: x[0]["seen"])
    distributed = tde.distribute_dataset(seen, mirrored)
    # By which Keras knows when an epoch ends.
    assert int(distributed.cardinality) == 3
    found = [
        [tf.sparse.to_dense(part, -1) for part in parts]
        for parts in map(mirrored.experimental_local_results, distributed)
    ]
    assert [[len(part) for part in parts] for parts in found] == [
        [4, 4],
        [4, 4],
        [1, 0],
    ]
    for parts, whole in zip(found, seen, strict=True):
        np.testing.assert_array_equal(
            tf.concat(parts, 0), tf.sparse.to_dense(whole, -1)
        )


def test_distribute_dataset_says_what_it_takes(mirrored) -> None:
    data = setup.dataset(8, 4)
    with pytest.raises(TypeError, match="takes a tf.data.Dataset"):
        tde.distribute_dataset([1, 2], mirrored)
    with pytest.raises(TypeError, match="not yet distributed"):
        tde.distribute_dataset(tde.distribute_dataset(data, mirrored), mirrored)
    with pytest.raises(TypeError, match=r"tf.distribute.Strategy or None"):
        tde.distribute_dataset(data, "mirrored")
    with pytest.raises(ValueError, match=r"multiple of the 2 replicas.* 5"):
        tde.distribute_dataset(data, mirrored, batch_size=5)
    with pytest.raises(TypeError, match="batch_size must be an int"):
        tde.distribute_dataset(data, mirrored, batch_size=4.0)
    with pytest.raises(TypeError, match="pad_last_batch must be a bool"):
        tde.distribute_dataset(data, mirrored, pad_last_batch=None)
