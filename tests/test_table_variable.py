"""A table that owns its optimizer, in every place where a step is taken.

Each test trains right, measured against dense tables trained by Keras, or
raises and leaves every table and slot as it was, to the bit.
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


@pytest.fixture(scope="module")
def expected() -> ref.State:
    """After three steps on the dense features."""
    return (
        ref.DenseReference(ref.DENSE_FEATURES, ref.own_optimizers()).run().state
    )


def eagerly(step: Callable) -> Callable:
    return step


def trained_by(optimizer: Any, **arguments: Any) -> ref.State:
    layer = ref.make_layer(optimizers=ref.own_optimizers())
    ref.train(layer, optimizer=optimizer, **arguments)
    return ref.state_of(layer)


# -- Where a step is taken ---------------------------------------------------


@pytest.mark.parametrize("wrap", [tf.function, eagerly])
def test_a_step_equals_dense_keras_on_the_touched_rows(
    wrap: Callable, expected: ref.State
) -> None:
    layer = ref.make_layer(optimizers=ref.own_optimizers())
    never = ref.state_of(layer)["item"]["values"][[4, 9]]
    ref.train(layer, wrap=wrap)
    ref.assert_close(ref.state_of(layer), expected)
    after = ref.state_of(layer)["item"]
    np.testing.assert_array_equal(after["values"][[4, 9]], never)
    np.testing.assert_array_equal(after["momentum"][[4, 9]], 0)


@pytest.mark.parametrize("wrap", [tf.function, eagerly])
def test_ragged_rows_weights_and_empty_rows(wrap: Callable) -> None:
    layer = ref.make_layer(ref.RAGGED_FEATURES, ref.own_optimizers())
    ref.train(layer, ref.RAGGED_FEATURES, wrap=wrap)
    reference = ref.DenseReference(ref.RAGGED_FEATURES, ref.own_optimizers())
    ref.assert_close(ref.state_of(layer), reference.run().state)


def test_the_forward_of_inference_trains_the_same(expected: ref.State) -> None:
    layer = ref.make_layer(optimizers=ref.own_optimizers())
    ref.train(layer, training=False)
    ref.assert_close(ref.state_of(layer), expected)


class _Subclass(K.Optimizer):
    """A user's optimizer, which knows nothing of tables."""

    def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
        self.assign_sub(variable, gradient * tf.cast(rate, variable.dtype))


class _Wrapper(K.SGD):
    """A user's optimizer that changes the gradients on their way."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        grads = [
            g if isinstance(g, tf.IndexedSlices) else g * 0.5 for g in grads
        ]
        return super().apply(grads, trainable_variables)


MODEL_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: K.Adam(0.1),
    "adamw": lambda: K.AdamW(0.1, weight_decay=0.5),
    "lion": lambda: K.Lion(0.1),
    "adafactor": lambda: K.Adafactor(0.1),
    "nadam": lambda: K.Nadam(0.1),
    "rmsprop": lambda: K.RMSprop(0.1),
    "ftrl": lambda: K.Ftrl(0.1),
    "lamb": lambda: K.Lamb(0.1),
    "nesterov": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "clipnorm": lambda: K.SGD(0.1, clipnorm=1e-3),
    "global_clipnorm": lambda: K.SGD(0.1, global_clipnorm=1e-3),
    "clipvalue": lambda: K.SGD(0.1, clipvalue=1e-3),
    "weight_decay": lambda: K.SGD(0.1, weight_decay=0.5),
    "subclass": lambda: _Subclass(0.1),
    "wrapper": lambda: _Wrapper(0.1),
}
if hasattr(K, "ScheduleFreeAdamW"):  # Keras 3.15; before, Muon fails on any
    MODEL_OPTIMIZERS["schedule_free"] = lambda: K.ScheduleFreeAdamW(0.1)
    MODEL_OPTIMIZERS["muon"] = lambda: K.Muon(0.1)


@pytest.mark.parametrize("name", MODEL_OPTIMIZERS)
def test_the_models_optimizer_does_not_reach_the_tables(name: str) -> None:
    """One step each, after which the tables do not depend on the head."""
    optimizer = MODEL_OPTIMIZERS[name]()
    layer = ref.make_layer(optimizers=ref.own_optimizers())
    head = ref.train(layer, optimizer=optimizer, wrap=eagerly, steps=[0])
    reference = ref.DenseReference(ref.DENSE_FEATURES, ref.own_optimizers())
    ref.assert_close(ref.state_of(layer), reference.run([0]).state)
    assert np.any(head.kernel.numpy() != ref.make_head().kernel.numpy())
    shapes = [tuple(variable.shape) for variable in optimizer.variables]
    assert (11, 4) not in shapes
    assert (6, 3) not in shapes


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("how", ["apply", "apply_built", "apply_gradients"])
def test_each_way_to_apply_gradients(
    how: str, built: bool, expected: ref.State
) -> None:
    layer, head = (
        ref.make_layer(optimizers=ref.own_optimizers()),
        ref.make_head(),
    )
    optimizer = K.SGD(0.1)
    variables = head.trainable_variables + layer.trainable_variables
    if built or how == "apply_built":
        optimizer.build(variables)
    for number in range(ref.STEPS):
        ids, weights, labels = ref.batch_of(ref.DENSE_FEATURES, number)
        with tf.GradientTape() as tape:
            outputs = layer(ids, weights, training=True)
            loss = ref.loss_of(outputs, head, labels)
        gradients = tape.gradient(loss, variables)
        if how == "apply":
            optimizer.apply(gradients, variables)
        elif how == "apply_built":
            optimizer.apply(gradients)
        else:
            pairs = zip(gradients, variables, strict=True)
            optimizer.apply_gradients(pairs)
    ref.assert_close(ref.state_of(layer), expected)


def test_an_optimizer_that_is_given_the_table_alone() -> None:
    layer, head = (
        ref.make_layer(optimizers=ref.own_optimizers()),
        ref.make_head(),
    )
    item = layer.trainable_variables[:1]
    before = ref.state_of(layer)["user"]
    ids, weights, labels = ref.batch_of(ref.DENSE_FEATURES, 0)
    with tf.GradientTape() as tape:
        loss = ref.loss_of(layer(ids, weights), head, labels)
    K.Adam().apply(tape.gradient(loss, item), item)
    reference = ref.DenseReference(ref.DENSE_FEATURES, ref.own_optimizers())
    after = ref.state_of(layer)
    reached = reference.run([0]).state["item"]
    ref.assert_close({"item": after["item"]}, {"item": reached})
    ref.assert_same({"user": after["user"]}, {"user": before})


def test_gradients_may_be_clipped_by_the_user() -> None:
    layer, head = ref.make_layer(optimizers="sgd"), ref.make_head()
    variables = layer.trainable_variables + head.trainable_variables
    ids, weights, labels = ref.batch_of(ref.DENSE_FEATURES, 0)
    with tf.GradientTape() as tape:
        loss = ref.loss_of(layer(ids, weights, training=True), head, labels)
    before = ref.state_of(layer)
    gradients = tape.gradient(loss, variables)
    clipped, norm = tf.clip_by_global_norm(gradients, 0.5)
    K.SGD().apply(clipped, variables)
    after = ref.state_of(layer)
    for table, gradient in zip(ref.TABLES, gradients, strict=False):
        full = tf.convert_to_tensor(gradient) * 0.5 / norm
        moved = after[table]["values"] - before[table]["values"]
        np.testing.assert_allclose(moved, -0.01 * full, atol=1e-7)


if hasattr(K, "MultiOptimizer"):

    def test_several_optimizers_of_the_model(expected: ref.State) -> None:
        """The scale is on the outer and on each inner optimizer."""
        first, rest = K.SGD(0.1), K.SGD(0.1)
        optimizer = K.MultiOptimizer(
            lambda variable: first if len(variable.shape) == 2 else rest,
            loss_scale_factor=8.0,
        )
        ref.assert_close(trained_by(optimizer, wrap=eagerly), expected)


# -- Under fit, control flow and functions -----------------------------------


@pytest.mark.parametrize(
    "arguments",
    [{}, {"run_eagerly": True}, {"steps_per_execution": 3}],
    ids=["graph", "eager", "steps_per_execution"],
)
def test_fit(arguments: dict[str, Any], expected: ref.State) -> None:
    layer = ref.make_layer(optimizers=ref.own_optimizers())
    model = ref.model_of(layer)
    start = ref.make_head().kernel[: model.layers[-1].kernel.shape[0]]
    model.layers[-1].kernel.assign(start)
    model.compile(K.SGD(0.1), "mse", **arguments)
    model.fit(ref.dense_dataset(), shuffle=False, verbose=0)
    ref.assert_close(ref.state_of(layer), expected)


def test_another_optimizer_of_the_model_keeps_slots_and_step() -> None:
    layer = ref.make_layer(optimizers=ref.own_optimizers())
    model = ref.model_of(layer)
    model.compile(K.SGD(0.1), "mse", run_eagerly=True)
    model.fit(ref.dense_dataset(), shuffle=False, verbose=0)
    before = ref.state_of(layer)
    model.compile(K.Adam(0.1), "mse", run_eagerly=True)
    ref.assert_same(ref.state_of(layer), before)
    model.fit(ref.dense_dataset(), shuffle=False, verbose=0)
    assert ref.state_of(layer)["item"]["step"] == 2 * ref.STEPS


def test_a_whole_step_inside_a_loop(expected: ref.State) -> None:
    def loop(step: Callable) -> Callable:
        @tf.function
        def run(ids: Any, labels: tf.Tensor) -> None:
            for i in tf.range(ref.STEPS):
                one = {name: value[i] for name, value in ids.items()}
                step(one, None, labels[i])

        return run

    layer, head = (
        ref.make_layer(optimizers=ref.own_optimizers()),
        ref.make_head(),
    )
    run = loop(ref.make_step(layer, head, K.SGD(0.1)))
    ids = {
        name: tf.constant(feature.steps, tf.int64)
        for name, feature in ref.DENSE_FEATURES.items()
    }
    run(ids, tf.constant(ref.LABELS))
    ref.assert_close(ref.state_of(layer), expected)


def test_a_step_inside_a_branch_and_an_inner_function(
    expected: ref.State,
) -> None:
    def branch(step: Callable) -> Callable:
        inner = tf.function(step)

        @tf.function
        def run(ids: Any, weights: Any, labels: tf.Tensor) -> tf.Tensor:
            if tf.size(labels) > 0:
                return inner(ids, weights, labels)
            return tf.constant(0.0)

        return run

    layer = ref.make_layer(optimizers=ref.own_optimizers())
    ref.train(layer, wrap=branch)
    ref.assert_close(ref.state_of(layer), expected)


def test_a_lookup_inside_a_branch_and_an_inner_function() -> None:
    layer = ref.make_layer(optimizers=ref.own_optimizers())
    head = ref.make_head()
    inner = tf.function(lambda ids: layer(ids, training=True))
    variables = layer.trainable_variables
    optimizer = K.SGD()
    optimizer.build(variables)

    @tf.function
    def step(ids: Any, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.cond(
                tf.size(labels) > 0,
                lambda: ref.loss_of(inner(ids), head, labels),
                lambda: 0.0,
            )
        optimizer.apply(tape.gradient(loss, variables), variables)

    ids, _, labels = ref.batch_of(ref.DENSE_FEATURES, 0)
    step(ids, labels)
    reference = ref.DenseReference(ref.DENSE_FEATURES, ref.own_optimizers())
    ref.assert_close(ref.state_of(layer), reference.run([0]).state)


@pytest.mark.parametrize("wrap", [tf.function, eagerly])
def test_two_calls_in_a_step_are_summed_before_the_step(
    wrap: Callable,
) -> None:
    """Two towers on one layer: each row takes one step on its sum."""
    layer = ref.make_layer(optimizers=ref.own_optimizers())
    variables = layer.trainable_variables
    optimizer = K.SGD()
    optimizer.build(variables)

    def step(first: Any, second: Any) -> None:
        with tf.GradientTape() as tape:
            outputs = [layer(first, training=True), layer(second)]
            loss = tf.add_n(
                [tf.reduce_sum(v**2) for o in outputs for v in o.values()]
            )
        optimizer.apply(tape.gradient(loss, variables), variables)

    both = [ref.batch_of(ref.DENSE_FEATURES, number)[0] for number in (0, 1)]
    wrap(step)(*both)

    joined = ref.make_layer(optimizers=ref.own_optimizers())
    with tf.GradientTape() as tape:
        ids = {n: tf.concat([b[n] for b in both], 0) for n in both[0]}
        outputs = joined(ids)
        loss = tf.add_n([tf.reduce_sum(v**2) for v in outputs.values()])
    variables = joined.trainable_variables
    K.SGD().apply(tape.gradient(loss, variables), variables)
    ref.assert_close(ref.state_of(layer), ref.state_of(joined))


def _apply_loss(
    layer: tde.DistributedEmbedding, loss_of: Callable, number: int = 0
) -> None:
    ids, _, _ = ref.batch_of(ref.DENSE_FEATURES, number)
    with tf.GradientTape() as tape:
        loss = loss_of(layer(ids, training=True))
    variables = layer.trainable_variables
    K.SGD().apply(tape.gradient(loss, variables), variables)


def test_a_feature_without_a_gradient_counts_as_gradient_zero() -> None:
    """Its rows are touched: the momentum they have from before moves them."""
    layer = ref.make_layer(optimizers=K.Adam(0.05))
    _apply_loss(layer, lambda out: sum(tf.reduce_sum(v) for v in out.values()))
    before = ref.state_of(layer)
    _apply_loss(layer, lambda out: tf.reduce_sum(out["user"]), number=1)
    after = ref.state_of(layer)
    moved = np.any(after["item"]["values"] != before["item"]["values"], axis=1)
    # Rows 1, 2, 3, 5 have a momentum and are touched again; 8 is touched for
    # the first time, 6 and 7 have a momentum and are not touched.
    np.testing.assert_array_equal(np.flatnonzero(moved), [1, 2, 3, 5])
    np.testing.assert_allclose(
        after["item"]["momentum"][1], 0.9 * before["item"]["momentum"][1], 1e-6
    )
    np.testing.assert_array_equal(
        after["item"]["momentum"][6], before["item"]["momentum"][6]
    )
    assert after["item"]["step"] == 2


def test_computing_a_gradient_changes_nothing() -> None:
    """Until it is applied, however often it is computed."""
    layer = ref.make_layer(optimizers="adam")
    before = ref.state_of(layer)
    with tf.GradientTape(persistent=True) as tape:
        outputs = layer(ref.batch_of(ref.DENSE_FEATURES, 0)[0], training=True)
        loss = sum(tf.reduce_sum(value) for value in outputs.values())
    variables = layer.trainable_variables
    for _ in range(2):
        gradients = tape.gradient(loss, variables)
    ref.assert_same(ref.state_of(layer), before)
    K.SGD().apply(gradients, variables)
    for state in ref.state_of(layer).values():
        assert state["step"] == 1


def test_a_step_without_any_gradient_is_no_step() -> None:
    """Nothing of the layer is in the loss."""
    layer, head = ref.make_layer(optimizers="adam"), ref.make_head()
    variables = layer.trainable_variables + head.trainable_variables
    before = ref.state_of(layer)
    with tf.GradientTape() as tape:
        layer(ref.batch_of(ref.DENSE_FEATURES, 0)[0], training=True)
        loss = tf.reduce_sum(head(tf.ones([2, head.kernel.shape[0]])))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        K.SGD().apply(tape.gradient(loss, variables), variables)
    ref.assert_same(ref.state_of(layer), before)


@pytest.mark.parametrize("wrap", [tf.function, eagerly])
def test_a_step_without_ids_counts_and_moves_nothing(wrap: Callable) -> None:
    """Both an empty batch and one whose rows are all empty."""
    table = tde.TableConfig("t", 5, 2, optimizer="adam")
    layer = tde.DistributedEmbedding(tde.FeatureConfig("f", table))
    before = ref.state_of(layer)
    variables = layer.trainable_variables
    optimizer = K.SGD()
    optimizer.build(variables)

    def step(ids: tf.RaggedTensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            output = layer(ids, training=True)
            loss = tf.reduce_sum(output)
        optimizer.apply(tape.gradient(loss, variables), variables)
        return output

    run = wrap(step)
    assert run(ref.ragged([])).shape == (0, 2)
    np.testing.assert_array_equal(run(ref.ragged([[], []])), np.zeros([2, 2]))
    after = ref.state_of(layer)
    assert after["t"].pop("step") == 2
    before["t"].pop("step")
    ref.assert_same(after, before)


# -- Tables that do not train ------------------------------------------------


def test_trainable_false_of_a_table_never_moves() -> None:
    layer = ref.make_layer(
        optimizers=ref.own_optimizers(), tables={"user": {"trainable": False}}
    )
    before = ref.state_of(layer)["user"]
    assert [len(v.shape) for v in layer.trainable_variables] == [2]
    ref.train(layer)
    after = ref.state_of(layer)
    np.testing.assert_array_equal(after["user"]["values"], before["values"])
    assert set(after["user"]) == {"values"}
    assert after["item"]["step"] == ref.STEPS


def test_a_frozen_layer_keeps_its_tables_and_thaws() -> None:
    layer = ref.make_layer(optimizers=ref.own_optimizers())
    model = ref.model_of(layer)
    layer.trainable = False
    assert layer.trainable_variables == []
    model.compile(K.SGD(0.1), "mse", run_eagerly=True)
    before = ref.state_of(layer)
    model.fit(ref.dense_dataset(), shuffle=False, verbose=0)
    ref.assert_same(ref.state_of(layer), before)
    layer.trainable = True
    model.compile(K.SGD(0.1), "mse", run_eagerly=True)
    model.fit(ref.dense_dataset(), shuffle=False, verbose=0)
    after = ref.state_of(layer)
    assert after["item"]["step"] == ref.STEPS
    assert np.any(after["item"]["values"] != before["item"]["values"])
