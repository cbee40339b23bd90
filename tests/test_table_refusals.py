"""What a table with an optimizer of its own refuses.

After the error every table, slot and step count is as it was, to the bit,
those of the other tables too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests import dense_reference as ref

K = keras.optimizers


def eagerly(step: Callable) -> Callable:
    return step


def _layer_of_three() -> tde.DistributedEmbedding:
    """Keras applies from the last variable to the first: put the bad first."""
    tables = [
        tde.TableConfig(name, 6, 3, optimizer=optimizer)
        for name, optimizer in [("a", "adam"), ("b", "adagrad"), ("c", "sgd")]
    ]
    return tde.DistributedEmbedding(
        {t.name: tde.FeatureConfig(t.name, t) for t in tables}
    )


IDS = {
    "a": tf.constant([[1, 1], [2, 5]], tf.int64),
    "b": tf.constant([[3, 1], [0, 5]], tf.int64),
    "c": tf.constant([[4, 1], [2, 2]], tf.int64),
}


def _square_sum(outputs: dict[str, tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.reduce_sum(v**2) for v in outputs.values()])


def _tied_head(layer: tde.DistributedEmbedding) -> tf.Tensor:
    outputs = layer(IDS, training=True)
    table = tf.convert_to_tensor(layer.trainable_variables[0])
    logits = tf.matmul(outputs["b"], table, transpose_b=True)
    return tf.reduce_sum(logits) + _square_sum(outputs)


def _penalty_on_the_table(layer: tde.DistributedEmbedding) -> tf.Tensor:
    table = layer.trainable_variables[0]
    penalty = keras.regularizers.L2(0.1)(table)
    return _square_sum(layer(IDS, training=True)) + penalty


def _recomputed(layer: tde.DistributedEmbedding) -> tf.Tensor:
    def outputs(ids: tf.Tensor) -> tf.Tensor:
        found = layer({"a": ids, "b": ids, "c": ids}, training=True)
        return tf.concat(list(found.values()), 1)

    return tf.reduce_sum(tf.recompute_grad(outputs)(IDS["a"]))


def _in_a_loop(layer: tde.DistributedEmbedding) -> tf.Tensor:
    def body(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return i + 1, total + _square_sum(layer(IDS, training=True))

    return tf.while_loop(lambda i, _: i < 2, body, (0, 0.0))[1]


DENSE_USES = {
    "tied_head": (_tied_head, (tf.function, eagerly)),
    "penalty": (_penalty_on_the_table, (tf.function, eagerly)),
    "recompute_grad": (_recomputed, (tf.function, eagerly)),
    # Eagerly, a while_loop is a Python loop, and trains right.
    "while_loop": (_in_a_loop, (tf.function,)),
}


@pytest.mark.parametrize(
    "use, wrap",
    [
        pytest.param(use, wrap, id=f"{name}-{wrap.__name__}")
        for name, (use, wraps) in DENSE_USES.items()
        for wrap in wraps
    ],
)
def test_a_dense_gradient_raises_and_no_table_changes(
    use: Callable, wrap: Callable
) -> None:
    layer = _layer_of_three()
    _train_once(layer, lambda layer: _square_sum(layer(IDS, training=True)))
    with ref.raises_and_keeps(layer, ValueError, "got a dense gradient"):
        wrap(lambda: _train_once(layer, use))()


def _train_once(layer: tde.DistributedEmbedding, loss_of: Callable) -> None:
    variables = layer.trainable_variables
    with tf.GradientTape() as tape:
        loss = loss_of(layer)
    gradients = tape.gradient(loss, variables)
    with tf.init_scope():
        optimizer = K.SGD()
        optimizer.build(variables)
    optimizer.apply(gradients, variables)


@pytest.mark.parametrize("bad", range(3))
@pytest.mark.parametrize("outer", ["none", "loss_scale"])
def test_a_gradient_made_dense_raises_and_no_table_changes(
    bad: int, outer: str
) -> None:
    layer = _layer_of_three()
    variables = layer.trainable_variables
    with tf.GradientTape() as tape:
        loss = _square_sum(layer(IDS, training=True))
    gradients = tape.gradient(loss, variables)
    gradients[bad] = tf.convert_to_tensor(gradients[bad])
    optimizer = K.SGD()
    if outer == "loss_scale":
        optimizer = K.LossScaleOptimizer(optimizer, initial_scale=4.0)
    name = "abc"[bad]
    with ref.raises_and_keeps(layer, ValueError, f"'{name}' got a dense"):
        optimizer.apply(gradients, variables)


if hasattr(K, "MultiOptimizer"):

    def test_a_dense_gradient_under_several_optimizers_of_the_model() -> None:
        layer = _layer_of_three()
        variables = layer.trainable_variables
        with tf.GradientTape() as tape:
            loss = _square_sum(layer(IDS, training=True))
        gradients = tape.gradient(loss, variables)
        gradients[2] = tf.convert_to_tensor(gradients[2])
        first, rest = K.SGD(), K.SGD()
        optimizer = K.MultiOptimizer(
            lambda variable: first if variable is variables[0] else rest
        )
        with ref.raises_and_keeps(layer, ValueError, "'c' got a dense"):
            optimizer.apply(gradients, variables)


REFUSED = {
    "use_ema": ({"use_ema": True}, "use_ema=True"),
    "ema_overwrite": (
        {"use_ema": True, "ema_overwrite_frequency": 2},
        "use_ema=True",
    ),
    "gradient_accumulation_steps": (
        {"gradient_accumulation_steps": 2},
        "gradient_accumulation_steps=2",
    ),
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_of_the_models_optimizer_is_refused(
    name: str, momentum: float, wrapped: bool
) -> None:
    settings, match = REFUSED[name]
    layer = _layer_of_three()
    variables = layer.trainable_variables
    with tf.GradientTape() as tape:
        loss = _square_sum(layer(IDS, training=True))
    optimizer = K.SGD(0.1, momentum=momentum, **settings)
    if wrapped:
        optimizer = K.LossScaleOptimizer(optimizer)
    with ref.raises_and_keeps(layer, ValueError, match):
        optimizer.apply(tape.gradient(loss, variables), variables)


@pytest.mark.parametrize("name", REFUSED)
def test_fit_refuses_them_too(name: str) -> None:
    settings, match = REFUSED[name]
    layer = ref.make_layer(optimizers="adam")
    model = ref.model_of(layer)
    model.compile(K.Adam(**settings), "mse")
    with ref.raises_and_keeps(layer, ValueError, match):
        model.fit(ref.dense_dataset(), shuffle=False, verbose=0)


@pytest.mark.parametrize("setting", ["regularizer", "constraint"])
def test_a_table_takes_no_regularizer_and_no_constraint(setting: str) -> None:
    layer = _layer_of_three()
    table = layer.trainable_variables[0]
    value = {
        "regularizer": keras.regularizers.L2(0.1),
        "constraint": keras.constraints.NonNeg(),
    }[setting]
    with ref.raises_and_keeps(layer, ValueError, f"'a' takes no {setting}"):
        setattr(table, setting, value)
    setattr(table, setting, None)
    assert getattr(table, setting) is None


def test_a_penalty_on_the_looked_up_rows_is_fine() -> None:
    layer = _layer_of_three()
    before = ref.state_of(layer)["c"]["values"]
    _train_once(layer, lambda layer: _square_sum(layer(IDS)))
    after = ref.state_of(layer)["c"]["values"]
    assert np.any(after[[4, 1, 2]] != before[[4, 1, 2]])


@pytest.mark.parametrize("wrap", [tf.function, eagerly])
def test_an_id_outside_its_table_raises_and_no_table_changes(
    wrap: Callable,
) -> None:
    """The gradient of a sum does not need the rows that were looked up."""
    layer = _layer_of_three()
    variables = layer.trainable_variables
    optimizer = K.SGD()
    optimizer.build(variables)

    def step(ids: Any) -> None:
        with tf.GradientTape() as tape:
            outputs = layer(ids, training=True)
            loss = tf.add_n([tf.reduce_sum(v) for v in outputs.values()])
        optimizer.apply(tape.gradient(loss, variables), variables)

    run = wrap(step)
    run(IDS)
    for name in "abc":
        bad = {**IDS, name: tf.constant([[1, 6], [2, 2]], tf.int64)}
        error = tf.errors.InvalidArgumentError
        with ref.raises_and_keeps(layer, error, rf"Feature \W+{name}\W.*id 6"):
            run(bad)


@pytest.mark.filterwarnings("ignore:.*looks like it has unbuilt state")
def test_a_layer_made_while_a_functional_model_is_traced() -> None:
    """Keras keeps no variables there; the error says where to make it."""

    class Inner(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.inner = ref.make_layer(optimizers="adam")

        def call(self, ids: tf.Tensor) -> tf.Tensor:
            return self.inner({"next": ids, "pair": ids, "user": ids})["next"]

    class Outer(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def call(self, ids: tf.Tensor) -> tf.Tensor:
            return self.inner(ids)

    with pytest.raises(ValueError, match="__init__"):
        Outer()(keras.Input((2,), dtype="int64"))
    assert Outer()(tf.constant([[1, 2]])).shape == (1, 4)
