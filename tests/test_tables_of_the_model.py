"""Tables without an optimizer of their own: ordinary weights of the model.

They equal a dense table, read by matrix products, that the same Keras
optimizer trains, with all of that optimizer's options.
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
NONE = {"item": None, "user": None}


def eagerly(step: Callable) -> Callable:
    return step


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "nesterov": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: K.Adagrad(0.1),
    "adam": lambda: K.Adam(0.05),
    "rmsprop": lambda: K.RMSprop(0.05),
    "adamw": lambda: K.AdamW(0.05, weight_decay=0.3),
    "clipnorm": lambda: K.SGD(0.1, clipnorm=0.5),
    "global_clipnorm": lambda: K.SGD(0.1, global_clipnorm=0.5),
    "clipvalue": lambda: K.SGD(0.1, clipvalue=0.05),
    "ema": lambda: K.SGD(0.1, use_ema=True, ema_momentum=0.5),
    "ema_overwrite": lambda: K.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "accumulation": lambda: K.Adam(0.05, gradient_accumulation_steps=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_they_train_as_a_dense_weight(name: str) -> None:
    layer = ref.make_layer(ref.RAGGED_FEATURES)
    optimizer = OPTIMIZERS[name]()
    head = ref.train(
        layer, ref.RAGGED_FEATURES, optimizer=optimizer, wrap=eagerly
    )
    reference = ref.DenseReference(
        ref.RAGGED_FEATURES, NONE, OPTIMIZERS[name]()
    ).run()
    variables = layer.trainable_variables + head.trainable_variables
    optimizer.finalize_variable_values(variables)
    reference.optimizer.finalize_variable_values(
        list(reference.tables.values()) + reference.head.trainable_variables
    )
    ref.assert_close(ref.state_of(layer), reference.state)
    np.testing.assert_allclose(
        head.kernel, reference.head.kernel, rtol=1e-5, atol=2e-6
    )


def test_in_a_function() -> None:
    layer = ref.make_layer(ref.RAGGED_FEATURES)
    ref.train(layer, ref.RAGGED_FEATURES, optimizer=K.Adam(0.05))
    reference = ref.DenseReference(ref.RAGGED_FEATURES, NONE, K.Adam(0.05))
    ref.assert_close(ref.state_of(layer), reference.run().state)


def test_the_forward_of_inference_sums_repeated_ids_too() -> None:
    layer = ref.make_layer()
    optimizer = K.Adagrad(0.1)
    ref.train(layer, optimizer=optimizer, wrap=eagerly, training=False)
    reference = ref.DenseReference(ref.DENSE_FEATURES, NONE, K.Adagrad(0.1))
    ref.assert_close(ref.state_of(layer), reference.run().state)


def test_one_of_each_in_a_layer() -> None:
    """The norm of all gradients is that of what the optimizer trains."""
    layer = ref.make_layer(optimizers={"item": K.Adam(0.05), "user": None})
    optimizer = K.SGD(0.1, global_clipnorm=0.5)
    ref.train(layer, optimizer=optimizer, wrap=eagerly)
    reference = ref.DenseReference(
        ref.DENSE_FEATURES,
        {"item": K.Adam(0.05), "user": None},
        K.SGD(0.1, global_clipnorm=0.5),
    )
    ref.assert_close(ref.state_of(layer), reference.run().state)
    assert set(layer.table_optimizers) == {"item"}
    assert set(layer.get_optimizer_state()) == {"item"}


IDS = {
    "a": tf.constant([[1, 1], [2, 5]], tf.int64),
    "b": tf.constant([[3, 1], [0, 5]], tf.int64),
}


def _small_layer() -> tde.DistributedEmbedding:
    """Rows of one-hot vectors would do; "a" has a row the batch leaves out."""
    tables = [
        tde.TableConfig(
            name, 6, 3, optimizer=None, combiner="sum", initializer=values
        )
        for name, values in _values().items()
    ]
    return tde.DistributedEmbedding(
        {t.name: tde.FeatureConfig(t.name, t) for t in tables}
    )


def _values() -> dict[str, np.ndarray]:
    grid = np.arange(18, dtype=np.float32).reshape(6, 3) / 16
    return {"a": grid, "b": grid[::-1].copy()}


def _lookup_by_hand(tables: dict[str, Any]) -> dict[str, tf.Tensor]:
    return {
        name: tf.matmul(tf.reduce_sum(tf.one_hot(ids, 6), axis=1), tables[name])
        for name, ids in IDS.items()
    }


def _tied_head(look_up: Callable, tables: dict[str, Any]) -> tf.Tensor:
    logits = tf.matmul(look_up()["b"], tables["a"], transpose_b=True)
    return tf.reduce_sum(logits**2)


def _penalty(look_up: Callable, tables: dict[str, Any]) -> tf.Tensor:
    penalty = tf.reduce_sum(tables["a"] ** 2)
    return tf.add_n([tf.reduce_sum(v**2) for v in look_up().values()]) + penalty


def _twice(look_up: Callable, tables: dict[str, Any]) -> tf.Tensor:
    """Each row has a gradient from either call, to be summed first."""
    return tf.reduce_sum((look_up()["a"] + 2.0 * look_up()["a"]) ** 2)


def _in_a_loop(look_up: Callable, tables: dict[str, Any]) -> tf.Tensor:
    def body(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return i + 1, total + tf.reduce_sum(look_up()["a"] ** 2)

    return tf.while_loop(lambda i, _: i < 3, body, (0, 0.0))[1]


def _recomputed(look_up: Callable, tables: dict[str, Any]) -> tf.Tensor:
    return tf.reduce_sum(
        tf.recompute_grad(lambda scale: scale * look_up()["a"])(2.0) ** 2
    )


def _one_feature(look_up: Callable, tables: dict[str, Any]) -> tf.Tensor:
    return tf.reduce_sum(look_up()["a"] ** 2)


DENSE_USES = {
    "tied_head": _tied_head,
    "penalty": _penalty,
    "twice": _twice,
    "while_loop": _in_a_loop,
    "recompute_grad": _recomputed,
    "one_feature": _one_feature,
}


@pytest.mark.parametrize("name", DENSE_USES)
def test_any_use_of_the_table_trains_it(name: str) -> None:
    layer = _small_layer()
    by_hand = {k: keras.Variable(v, name=k) for k, v in _values().items()}
    ours, theirs = (
        _trained(DENSE_USES[name], variables, look_up)
        for variables, look_up in [
            (layer.trainable_variables, lambda: layer(IDS, training=True)),
            (
                list(by_hand.values()),
                lambda: _lookup_by_hand(
                    {k: v.value for k, v in by_hand.items()}
                ),
            ),
        ]
    )
    for own, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


def _trained(use: Callable, variables: list, look_up: Callable) -> list:
    optimizer = K.Adagrad(0.1)
    optimizer.build(variables)

    @tf.function
    def step() -> None:
        tables = {"a": variables[0].value, "b": variables[1].value}
        with tf.GradientTape() as tape:
            loss = use(look_up, tables)
        gradients = [
            tf.zeros_like(variable.value) if gradient is None else gradient
            for gradient, variable in zip(
                tape.gradient(loss, variables), variables, strict=True
            )
        ]
        optimizer.apply(gradients, variables)

    step()
    step()
    return [variable.numpy() for variable in variables]


def test_a_frozen_table_is_no_weight_to_train() -> None:
    layer = ref.make_layer(tables={"user": {"trainable": False}})
    before = ref.state_of(layer)["user"]
    ref.train(layer, optimizer=K.AdamW(0.1, weight_decay=0.5), wrap=eagerly)
    ref.assert_same({"user": ref.state_of(layer)["user"]}, {"user": before})
    assert len(layer.trainable_variables) == 1
    assert len(layer.non_trainable_variables) == 1
