"""Two replicas: one step on the sum of both, equal copies, nothing lost.

What must raise comes last: an error in one replica may leave the collectives
of the process unusable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests import dense_reference as ref

K = keras.optimizers
FEATURES = ref.RAGGED_FEATURES

#: The rows of a batch that each of two replicas gets.
HALVES = (slice(0, 2), slice(2, 4))
UNEVEN = (slice(0, 1), slice(1, 4))
FIRST_EMPTY = (slice(0, 0), slice(0, 4))
LAST_EMPTY = (slice(0, 4), slice(4, 4))
ALL_EMPTY = (slice(0, 0), slice(0, 0))


def eagerly(step: Callable) -> Callable:
    return step


def make(
    strategy: tf.distribute.Strategy,
    optimizers: Any,
    optimizer: Callable[[], Any] = lambda: K.SGD(0.1),
) -> tuple[tde.DistributedEmbedding, Callable]:
    """A layer, and a step on each replica's part of a batch."""
    with strategy.scope():
        layer = ref.make_layer(FEATURES, optimizers)
        step = ref.make_step(layer, ref.make_head(), optimizer())
    return layer, step


def feed(
    strategy: tf.distribute.Strategy, number: int, parts: Sequence[slice]
) -> tuple[Any, Any, Any]:
    """(ids, weights, labels), each a value of every replica."""
    batches = [ref.batch_of(FEATURES, number, part) for part in parts]

    def of(place: int) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: batches[context.replica_id_in_sync_group][place]
        )

    # A None is no value; it is the same in all replicas.
    weights = {"seen": of(1)["seen"]} | {
        name: None for name, value in batches[0][1].items() if value is None
    }
    return of(0), weights, of(2)


def run(
    strategy: tf.distribute.Strategy,
    step: Callable,
    parts: Sequence[slice] = HALVES,
    steps: Sequence[int] = range(ref.STEPS),
) -> None:
    """Runs some steps, traced once."""
    call = tf.function(lambda *batch: strategy.run(step, args=batch))
    for number in steps:
        call(*feed(strategy, number, parts))


def assert_equal_copies(layer: tde.DistributedEmbedding) -> None:
    """Every table, slot and step count is the same on both devices."""
    checked = 0
    for table in layer.trainable_variables:
        variables = [table]
        if isinstance(
            optimizer := getattr(table, "row_optimizer", None), K.Optimizer
        ):
            variables += [*optimizer.slots.values(), optimizer.iterations]
        for variable in variables:
            first, second = variable.value.values
            np.testing.assert_array_equal(first.numpy(), second.numpy())
            checked += 1
    assert checked >= 2


def expected(
    optimizers: Mapping[str, Any],
    optimizer: Any = None,
    steps: Sequence[int] = range(ref.STEPS),
) -> ref.State:
    return ref.DenseReference(FEATURES, optimizers, optimizer).run(steps).state


def test_replicas_take_one_step_on_their_sum(
    mirrored: tf.distribute.Strategy,
) -> None:
    """Also if one of them gets no example at all."""
    layer, step = make(mirrored, ref.own_optimizers())
    run(mirrored, step, FIRST_EMPTY)
    ref.assert_close(ref.state_of(layer), expected(ref.own_optimizers()))
    assert_equal_copies(layer)


def test_eagerly(mirrored: tf.distribute.Strategy) -> None:
    layer, step = make(mirrored, ref.own_optimizers())
    for number, parts in enumerate([UNEVEN, LAST_EMPTY, HALVES]):
        mirrored.run(step, args=feed(mirrored, number, parts))
    ref.assert_close(ref.state_of(layer), expected(ref.own_optimizers()))
    assert_equal_copies(layer)


def test_a_batch_that_is_empty_on_every_replica(
    mirrored: tf.distribute.Strategy,
) -> None:
    """First and between: it counts as a step and moves nothing."""
    optimizers = {"item": K.Adagrad(0.1), "user": K.SGD(0.1)}
    layer, step = make(mirrored, optimizers)
    before = ref.state_of(layer)
    call = tf.function(lambda *batch: mirrored.run(step, args=batch))
    call(*feed(mirrored, 0, ALL_EMPTY))
    after = ref.state_of(layer)
    for table in before:
        assert after[table].pop("step") == 1
        before[table].pop("step")
    ref.assert_same(after, before)
    call(*feed(mirrored, 0, HALVES))
    call(*feed(mirrored, 1, ALL_EMPTY))
    call(*feed(mirrored, 1, HALVES))
    state = ref.state_of(layer)
    fresh = {"item": K.Adagrad(0.1), "user": K.SGD(0.1)}
    reached = expected(fresh, steps=[0, 1])
    for table in reached:
        assert state[table].pop("step") == 4
        reached[table].pop("step")
    ref.assert_close(state, reached)
    assert_equal_copies(layer)


def test_every_row_empty_on_one_replica(
    mirrored: tf.distribute.Strategy,
) -> None:
    """Rows without ids are no rows without examples."""
    with mirrored.scope():
        table = tde.TableConfig("t", 5, 2, optimizer="sgd", combiner="sum")
        layer = tde.DistributedEmbedding(tde.FeatureConfig("f", table))
        optimizer = K.SGD()
        optimizer.build(layer.trainable_variables)
    before = ref.state_of(layer)["t"]["values"]

    def step(ids: tf.RaggedTensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids, training=True))
        variables = layer.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    def call(*rows: list) -> None:
        ids = mirrored.experimental_distribute_values_from_function(
            lambda context: ref.ragged(rows[context.replica_id_in_sync_group])
        )
        mirrored.run(step, args=(ids,))

    call([[], []], [[4, 1], [1]])
    call([[], []], [[]])
    call([[4], []], [[4, 4]])
    moved = ref.state_of(layer)["t"]["values"] - before
    np.testing.assert_allclose(
        moved[:, 0], [0, -0.02, 0, 0, -0.01 * 4], atol=1e-7
    )
    assert ref.state_of(layer)["t"]["step"] == 3


LOSS_SCALED: dict[str, Callable[[], Any]] = {
    "dynamic": lambda: K.LossScaleOptimizer(K.SGD(0.1), initial_scale=1024.0),
    "factor": lambda: K.SGD(0.1, loss_scale_factor=64.0),
}


@pytest.mark.parametrize("name", LOSS_SCALED)
def test_the_loss_scale_is_divided_out(
    mirrored: tf.distribute.Strategy, name: str
) -> None:
    layer, step = make(mirrored, ref.own_optimizers(), LOSS_SCALED[name])
    run(mirrored, step, UNEVEN)
    ref.assert_close(ref.state_of(layer), expected(ref.own_optimizers()))
    assert_equal_copies(layer)


def test_two_calls_and_a_feature_without_gradient(
    mirrored: tf.distribute.Strategy,
) -> None:
    def one_step(scope: Any, replicas: Sequence[Sequence]) -> ref.State:
        with scope:
            layer = ref.make_layer(optimizers=K.Adam(0.05))
            optimizer = K.SGD()
            optimizer.build(layer.trainable_variables)

        def step(first: Any, second: Any) -> None:
            with tf.GradientTape() as tape:
                outputs = [layer(ids, training=True) for ids in (first, second)]
                loss = tf.add_n(
                    [tf.reduce_sum(o["next"] ** 2) for o in outputs]
                )
            variables = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)

        if len(replicas) == 1:
            step(*replicas[0])
            return ref.state_of(layer)
        values = [
            mirrored.experimental_distribute_values_from_function(
                lambda context, place=place: replicas[
                    context.replica_id_in_sync_group
                ][place]
            )
            for place in (0, 1)
        ]
        mirrored.run(step, args=values)
        assert_equal_copies(layer)
        return ref.state_of(layer)

    def ids(number: int, part: slice = slice(None)) -> Any:
        return ref.batch_of(ref.DENSE_FEATURES, number, part)[0]

    alone = one_step(tf.distribute.get_strategy().scope(), [(ids(0), ids(1))])
    both = one_step(
        mirrored.scope(),
        [(ids(0, part), ids(1, part)) for part in HALVES],
    )
    ref.assert_close(both, alone)


def test_tables_of_the_models_optimizer(
    mirrored: tf.distribute.Strategy,
) -> None:
    none = {"item": None, "user": None}
    layer, step = make(mirrored, none, lambda: K.Adam(0.05))
    run(mirrored, step, UNEVEN)
    ref.assert_close(ref.state_of(layer), expected(none, K.Adam(0.05)))
    assert_equal_copies(layer)


def test_fit(mirrored: tf.distribute.Strategy) -> None:
    """The last batch is smaller."""

    def fitted() -> ref.State:
        layer = ref.make_layer(optimizers=ref.own_optimizers())
        model = ref.model_of(layer)
        kernel = model.layers[-1].kernel
        kernel.assign(np.ones(kernel.shape) / 8)
        model.compile(K.SGD(0.1), "mse")
        data = ref.dense_dataset().unbatch().take(10).batch(4)
        data = data.apply(tf.data.experimental.assert_cardinality(3))
        model.fit(data, shuffle=False, verbose=0)
        return ref.state_of(layer)

    alone = fitted()
    with mirrored.scope():
        ref.assert_close(fitted(), alone)


def test_rates_reach_every_replica(mirrored: tf.distribute.Strategy) -> None:
    schedule = K.schedules.ExponentialDecay(0.2, 1, 0.5)
    layer, step = make(mirrored, {"item": K.SGD(schedule), "user": K.SGD(0.1)})
    reference = ref.DenseReference(
        FEATURES, {"item": K.SGD(schedule), "user": K.SGD(0.1)}
    )
    for number, rate in enumerate([0.1, 0.4]):
        layer.table_optimizers["user"].learning_rate = rate
        reference.optimizers["user"].learning_rate = rate
        mirrored.run(step, args=feed(mirrored, number, HALVES))
        reference.step(number)
    ref.assert_close(ref.state_of(layer), reference.state)


def test_setting_tables_sets_every_copy(
    mirrored: tf.distribute.Strategy,
) -> None:
    with mirrored.scope():
        layer = ref.make_layer(FEATURES, "adam")
    layer.set_embedding_tables({"item": np.full((11, 4), 3.0)})
    layer.set_embedding_tables({"user": ([1, 5], np.ones((2, 3)))})
    assert_equal_copies(layer)
    np.testing.assert_array_equal(layer.get_embedding_tables()["item"], 3.0)
    np.testing.assert_array_equal(
        layer.get_embedding_tables()["user"].numpy()[[1, 5]], 1.0
    )


@pytest.mark.parametrize("form", ["ragged", "sparse", "dense"])
def test_preprocessed_inputs_pass_through_it(
    mirrored: tf.distribute.Strategy, form: str
) -> None:
    with mirrored.scope():
        table = tde.TableConfig("item", 11, 4, combiner="mean")
        layer = tde.DistributedEmbedding([tde.FeatureConfig("f", table)])
    ids: Any = tf.constant([[1, 1, 2], [3, 4, 5]])
    if form != "dense":
        ids = tf.RaggedTensor.from_tensor(ids, lengths=[3, 1])
    weights = tf.cast(ids, "float32")
    if form == "sparse":
        ids, weights = ids.to_sparse(), weights.to_sparse()
    preprocessed = layer.preprocess([ids], [weights])
    call = tf.function(lambda x: mirrored.run(layer, args=(x,)))
    (found,) = call(preprocessed)
    (expected,) = layer([ids], [weights])
    for one in mirrored.experimental_local_results(found):
        np.testing.assert_allclose(one, expected, rtol=1e-6)


# -- What raises -------------------------------------------------------------


@pytest.mark.parametrize("wrap", [tf.function, eagerly])
def test_a_layer_made_outside_the_scope_raises(
    mirrored: tf.distribute.Strategy, wrap: Callable
) -> None:
    """Else both replicas would update one copy. No other table changes."""
    inside = tde.TableConfig("inside", 5, 2, optimizer="adagrad")
    outside = tde.TableConfig("outside", 5, 2, optimizer="adagrad")
    first = tde.DistributedEmbedding(tde.FeatureConfig("outside", outside))
    with mirrored.scope():
        second = tde.DistributedEmbedding(tde.FeatureConfig("inside", inside))
        # The last variable is the first one that Keras comes to.
        variables = first.trainable_variables + second.trainable_variables
        optimizer = K.SGD()
        optimizer.build(variables)

    def step(ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(first(ids)) + tf.reduce_sum(second(ids))
        optimizer.apply(tape.gradient(loss, variables), variables)

    call = wrap(lambda ids: mirrored.run(step, args=(ids,)))
    before = ref.state_of(second)
    with ref.raises_and_keeps(first, ValueError, "'outside' was made outside"):
        call(tf.constant([1, 2]))
    ref.assert_same(ref.state_of(second), before)
