"""dtype policies and loss scales: what a table holds, gives and learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests import dense_reference as ref

K = keras.optimizers
FEATURES = ref.RAGGED_FEATURES

#: Policy -> (dtype of the tables, dtype of the outputs, what a step may err).
POLICIES = {
    "mixed_bfloat16": ("float32", "bfloat16", 2e-2),
    "mixed_float16": ("float32", "float16", 2e-3),
    "bfloat16": ("bfloat16", "bfloat16", 5e-2),
    "float64": ("float64", "float64", 1e-5),
    "float32": ("float32", "float32", 1e-5),
}


def eagerly(step: Callable) -> Callable:
    return step


@pytest.fixture(autouse=True)
def _float32_afterwards() -> Iterator[None]:
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture(scope="module")
def expected() -> ref.State:
    return ref.DenseReference(FEATURES, ref.own_optimizers()).run().state


def _step(
    layer: tde.DistributedEmbedding, optimizer: Any = None
) -> Callable[..., tf.Tensor]:
    return ref.make_step(layer, ref.make_head(), optimizer or K.SGD(0.1))


def _run(step: Callable, steps: Any = range(ref.STEPS)) -> None:
    for number in steps:
        step(*ref.batch_of(FEATURES, number))


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_reaches_tables_slots_and_outputs(
    name: str, expected: ref.State
) -> None:
    table, output, error = POLICIES[name]
    layer = ref.make_layer(FEATURES, ref.own_optimizers(), dtype=name)
    for variable in layer.trainable_variables:
        assert variable.dtype == table
        for slot in variable.row_optimizer.slots.values():
            assert slot.dtype == table
    ids, weights, _ = ref.batch_of(FEATURES, 0)
    for training in (False, True):
        outputs = layer(ids, weights, training=training)
        assert {v.dtype.name for v in outputs.values()} == {output}
    _run(_step(layer))
    ref.assert_close(ref.state_of(layer), expected, atol=error, rtol=error)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_every_kind_and_combiner_in_every_dtype(
    name: str, combiner: str
) -> None:
    """With weights and without, in training and not; gradients too."""
    values = np.arange(1, 11, dtype=np.float32).reshape(5, 2) / 8
    rows = [[1, 1, 4], [], [0, 2]]
    weights = [[1.0, 0.5, 2.0], [], [0.0, 3.0]]

    def run(dtype: str, training: bool) -> list[np.ndarray]:
        table = tde.TableConfig(
            "t", 5, 2, combiner=combiner, optimizer="sgd", initializer=values
        )
        names = ("plain", "weighted", "sparse", "dense", "single", "sequence")
        layer = tde.DistributedEmbedding(
            {
                name: tde.FeatureConfig(
                    name,
                    table,
                    None,
                    (None, 2, 2) if name == "sequence" else None,
                )
                for name in names
            },
            dtype=dtype,
        )
        ids = {
            "plain": ref.ragged(rows),
            "weighted": ref.ragged(rows),
            "sparse": ref.sparse(rows),
            "dense": ref.dense([[1, 2], [4, 4], [0, 3]]),
            "single": tf.constant([4, 0, 4]),
            "sequence": ref.ragged(rows),
        }
        given = dict.fromkeys(names)
        given["weighted"] = ref.ragged(weights, tf.float32)
        given["dense"] = ref.dense([[1, 2], [0, 0.5], [1, -3]], tf.float32)
        with tf.GradientTape() as tape:
            outputs = [
                tf.cast(value, tf.float32)
                for value in layer(ids, given, training=training).values()
            ]
            loss = tf.add_n([tf.reduce_sum(value**2) for value in outputs])
        gradient = tape.gradient(loss, layer.trainable_variables)[0]
        dense = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
        return [*outputs, dense]

    tolerance = {"bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-6}[name]
    for training in (False, True):
        for got, right in zip(
            run(name, training), run("float32", True), strict=True
        ):
            np.testing.assert_allclose(got, right, tolerance, tolerance)


def test_float64_is_not_rounded_to_float32() -> None:
    values = np.full((3, 2), 1 + 2**-40)
    table = tde.TableConfig("t", 3, 2, optimizer="sgd", initializer=values)
    layer = tde.DistributedEmbedding(
        tde.FeatureConfig("f", table), dtype="float64"
    )
    np.testing.assert_array_equal(layer(tf.constant([1])), values[:1])
    np.testing.assert_array_equal(
        layer(ref.ragged([[1, 1], []]), training=True)[0], values[0]
    )


def test_a_table_of_the_models_optimizer_in_bfloat16() -> None:
    none = {"item": None, "user": None}
    layer = ref.make_layer(FEATURES, none, dtype="bfloat16")
    _run(_step(layer, K.SGD(0.1)))
    state = ref.DenseReference(FEATURES, none, K.SGD(0.1)).run().state
    ref.assert_close(ref.state_of(layer), state, atol=5e-2, rtol=5e-2)


# -- Loss scales -------------------------------------------------------------

SCALED: dict[str, Callable[[], Any]] = {
    "dynamic": lambda: K.LossScaleOptimizer(K.SGD(0.1), initial_scale=1024.0),
    # Doubled after every step.
    "growing": lambda: K.LossScaleOptimizer(
        K.SGD(0.1), initial_scale=4.0, dynamic_growth_steps=1
    ),
    "factor": lambda: K.SGD(0.1, loss_scale_factor=1024.0),
    "around_adam": lambda: K.LossScaleOptimizer(K.Adam(0.1)),
}


@pytest.mark.parametrize(
    "name, wrap",
    [("dynamic", tf.function), *((name, eagerly) for name in SCALED)],
)
def test_a_loss_scale_is_divided_out(name: str, wrap: Callable) -> None:
    layer = ref.make_layer(FEATURES, ref.own_optimizers())
    steps = range(1) if name == "around_adam" else range(ref.STEPS)
    _run(wrap(_step(layer, SCALED[name]())), steps)
    reference = ref.DenseReference(FEATURES, ref.own_optimizers()).run(steps)
    ref.assert_close(ref.state_of(layer), reference.state)


@pytest.mark.parametrize("wrap", [tf.function, eagerly])
def test_a_step_that_overflows_is_skipped(wrap: Callable) -> None:
    """No row, slot or step count of any table moves; then training goes on."""
    layer = ref.make_layer(FEATURES, ref.own_optimizers())
    optimizer = K.LossScaleOptimizer(K.SGD(0.1), initial_scale=2.0**127)
    step = wrap(_step(layer, optimizer))
    before = ref.state_of(layer)
    ids, weights, labels = ref.batch_of(FEATURES, 0)
    step(ids, weights, 1e6 * labels)
    ref.assert_same(ref.state_of(layer), before)
    assert float(optimizer.dynamic_scale) == 2.0**126
    optimizer.dynamic_scale.assign(64.0)
    _run(step)
    reference = ref.DenseReference(FEATURES, ref.own_optimizers()).run()
    ref.assert_close(ref.state_of(layer), reference.state)


def test_a_table_that_overflows_alone_skips_the_step_too() -> None:
    """The others' gradients are finite, and none of them is applied."""
    layer = ref.make_layer(FEATURES, ref.own_optimizers())
    head, optimizer = ref.make_head(), K.LossScaleOptimizer(K.SGD(0.1))
    variables = layer.trainable_variables + head.trainable_variables
    ids, weights, labels = ref.batch_of(FEATURES, 0)
    with tf.GradientTape() as tape:
        loss = ref.loss_of(layer(ids, weights, training=True), head, labels)
    gradients = tape.gradient(loss, variables)
    bad = gradients[0].values * np.inf
    gradients[0] = tf.IndexedSlices(
        bad, gradients[0].indices, gradients[0].dense_shape
    )
    before = ref.state_of(layer)
    optimizer.apply(gradients, variables)
    ref.assert_same(ref.state_of(layer), before)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_fit_under_a_mixed_policy(policy: str) -> None:
    """Keras wraps the model's optimizer for float16."""

    def fitted(policy: str) -> ref.State:
        keras.config.set_dtype_policy(policy)
        layer = ref.make_layer(optimizers=ref.own_optimizers())
        model = ref.model_of(layer)
        kernel = model.layers[-1].kernel
        kernel.assign(np.ones(kernel.shape) / 8)
        model.compile(K.SGD(0.1), "mse")
        scales = isinstance(model.optimizer, K.LossScaleOptimizer)
        assert scales == (policy == "mixed_float16")
        model.fit(ref.dense_dataset(), shuffle=False, verbose=0)
        assert layer.compute_dtype == policy.removeprefix("mixed_")
        assert {v.dtype for v in layer.trainable_variables} == {"float32"}
        return ref.state_of(layer)

    error = POLICIES[policy][2]
    expected = fitted("float32")
    ref.assert_close(fitted(policy), expected, atol=error, rtol=error)
