"""make_strategy, distribute_dataset, and loops of one's own."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests import training_setup as setup

# Minutes in one process with other strategies.
pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize(
    "chips,kind,distribute",
    [
        (1, "ragged", True),
        (2, "ragged", True),
        (2, "sparse", True),
        (2, "dense", False),
        pytest.param(4, "ragged", True, marks=pytest.mark.slow),
        pytest.param(1, "sparse", True, marks=pytest.mark.slow),
        pytest.param(1, "dense", False, marks=pytest.mark.slow),
        pytest.param(4, "dense", False, marks=pytest.mark.slow),
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


def test_make_strategy_says_what_it_chose(capsys, monkeypatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = tde.make_strategy()
    assert strategy is tf.distribute.get_strategy()
    assert "no TPU and no GPU, so the CPU" in capsys.readouterr().out
    assert tde.make_strategy("cpu") is strategy
    data = setup.dataset(8, 4)
    assert tde.distribute_dataset(data, strategy) is data


def test_make_strategy_over_named_devices(capsys) -> None:
    # One device: a second strategy of several would share the collectives.
    strategy = tde.make_strategy("mirrored", devices=["CPU:3"])
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    assert strategy.num_replicas_in_sync == 1
    assert "MirroredStrategy, 1 replica" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"no device \['CPU:9'\].*CPU:0"):
        tde.make_strategy("mirrored", devices=["CPU:0", "CPU:9"])


def test_a_tpu_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match=r"found no TPU that works.*TPUs? "):
        tde.make_strategy("tpu")
    with pytest.raises(RuntimeError, match="found no TPU that works"):
        tde.make_strategy("tpu", tpu="")


@pytest.mark.parametrize("kind", ["gpu", "mirrored"])
def test_gpus_that_are_not_there(kind: str) -> None:
    if tf.config.list_logical_devices("GPU"):
        assert tde.make_strategy(kind).num_replicas_in_sync >= 1
        return
    with pytest.raises(RuntimeError, match="found no GPU.*devices="):
        tde.make_strategy(kind)


@pytest.mark.parametrize(
    "error,match,arguments",
    [
        (TypeError, "kind must be a str", {"kind": 3}),
        (ValueError, "one of .*'auto'", {"kind": "gpus"}),
        (ValueError, "ParameterServer", {"kind": "parameter_server"}),
        (ValueError, "devices is for", {"kind": "tpu", "devices": ["a"]}),
        (TypeError, "list of names", {"kind": "cpu", "devices": "CPU:0"}),
        (ValueError, "are for kind", {"kind": "cpu", "task": 0}),
        (ValueError, "come together", {"kind": "multi_worker", "task": 0}),
        (
            TypeError,
            "task must be",
            {
                "kind": "multi_worker",
                "cluster_spec": {"worker": ["localhost:1"]},
                "task": "worker",
            },
        ),
        (
            ValueError,
            "ParameterServer",
            {
                "kind": "multi_worker",
                "cluster_spec": {"worker": ["a:1"], "ps": ["b:1"]},
                "task": 0,
            },
        ),
    ],
)
def test_make_strategy_says_what_it_takes(error, match, arguments) -> None:
    with pytest.raises(error, match=match):
        tde.make_strategy(**arguments)


def test_multi_worker_needs_to_know_the_workers(monkeypatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(RuntimeError, match="TF_CONFIG"):
        tde.make_strategy("multi_worker")
    monkeypatch.setenv("TF_CONFIG", "not json")
    with pytest.raises(ValueError, match="no JSON"):
        tde.make_strategy("auto")
    cluster = {"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(ValueError, match="ParameterServerStrategy is not"):
        tde.make_strategy("auto")


def test_multi_worker_that_comes_too_late() -> None:
    tf.constant(1.0)
    with pytest.raises(RuntimeError, match=r"comes too late.*Call it first"):
        tde.make_strategy(
            "multi_worker",
            cluster_spec={"worker": ["localhost:1", "localhost:2"]},
            task=("worker", 1),
        )


def test_make_strategy_inside_a_scope(mirrored) -> None:
    with (
        mirrored.scope(),
        pytest.raises(RuntimeError, match="inside the scope"),
    ):
        tde.make_strategy("cpu")


def test_a_layer_refuses_parameter_servers(monkeypatch) -> None:
    # A real one would need running servers before it has a scope.
    kind = tf.distribute.ParameterServerStrategy
    strategy = object.__new__(kind)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    with pytest.raises(ValueError, match="ParameterServerStrategy is not"):
        setup.layer()


def test_a_layer_refuses_what_keras_would_ignore() -> None:
    """Keras' TensorFlow backend trains on one device, and does not say so."""
    devices = ["cpu:0", "cpu:1"]
    try:
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(devices=devices[:1])
        )
        setup.layer()
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(devices=devices)
        )
        with pytest.raises(ValueError, match=r"over 2 devices.*make_strategy"):
            setup.layer()
    finally:
        keras.distribution.set_distribution(None)
