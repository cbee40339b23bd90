"""The tables of a layer on SparseCores: size, steps, values, placement."""

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

# -- 8. size and shards ------------------------------------------------------


def test_a_stack_of_2_to_the_31_rows_raises_before_anything_is_made():
    with emulated(), pytest.raises(ValueError, match="2,147,483,648"):
        tde.DistributedEmbedding(
            [
                tde.FeatureConfig(
                    name, table(name, rows=2**30, initializer="zeros")
                )
                for name in ("a", "b")
            ]
        )


def test_sparsecores_that_are_no_power_of_two_raise():
    with emulated(3, 4), pytest.raises(ValueError, match="power of two.*12 in"):
        tde.DistributedEmbedding(tde.FeatureConfig("item", table()))


# -- 9. one step count a stack -----------------------------------------------


def test_step_counts_that_a_stack_cannot_have_raise(tmp_path):
    features = [
        tde.FeatureConfig(name, table(name, optimizer="adam"))
        for name in ("a", "b")
    ]
    alone = [tde.DistributedEmbedding(feature) for feature in features]
    variables = alone[0].trainable_variables
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(alone[0](tf.range(3)))
    keras.optimizers.SGD().apply(tape.gradient(loss, variables), variables)
    for layer, name in zip(alone, "ab", strict=True):
        tde.save_tables(layer, tmp_path / name)
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(features)
        lookup(strategy, layer, [tf.range(ROWS), tf.range(ROWS)])
        with pytest.raises(ValueError, match="'a': 1.*'b': 0"):
            tde.load_tables(layer, tmp_path / "a", tables=["a"])
        np.testing.assert_array_equal(
            layer.get_embedding_tables()["a"], coded(40, 4)
        )


# -- 10. state is moved between steps ----------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda layer: layer.get_embedding_tables(),
        lambda layer: layer.set_embedding_tables({"item": coded(40, 4)}),
        lambda layer: layer.get_optimizer_state(),
    ],
    ids=["get", "set", "slots"],
)
def test_state_is_refused_inside_of_a_step(call):
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(), (ROWS,))
        )

        @tf.function
        def step():
            strategy.run(lambda: call(layer))

        with pytest.raises(RuntimeError, match="between steps"):
            step()


# -- values, optimizers and placement ----------------------------------------


def initial_values() -> dict[str, tf.Tensor]:
    """Those of stacked tables, and of each way to draw values."""
    keras.utils.set_random_seed(3)
    initializers = {
        "default": None,
        "name": "uniform",
        "stacked": keras.initializers.TruncatedNormal(stddev=0.5),
        "seeded": keras.initializers.RandomNormal(seed=7),
        "whole": keras.initializers.Orthogonal(),
        "array": coded(100, 4),
    }
    return tde.DistributedEmbedding(
        [
            tde.FeatureConfig(
                name, table(name, initializer=initializer, rows=100), (32,)
            )
            for name, initializer in initializers.items()
        ]
    ).get_embedding_tables()


@pytest.mark.parametrize("chips, cores", [(1, 2), (1, 4), (2, 4), (4, 2)])
def test_initial_values_equal_the_default_device_s(chips, cores):
    expected = initial_values()
    with emulated(chips, cores):
        found = initial_values()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_rows_can_be_set_and_a_whole_table_before_the_variables_are_made():
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(tde.FeatureConfig("item", table()))
        with pytest.raises(RuntimeError, match="no variables yet"):
            layer.get_embedding_tables()
        layer.set_embedding_tables({"item": coded(40, 4) * 2})
        layer.set_embedding_tables({"item": ([39], np.ones((1, 4)))})
        lookup(strategy, layer, tf.range(ROWS))
        expected = coded(40, 4) * 2
        expected[39] = 1
        np.testing.assert_array_equal(
            layer.get_embedding_tables()["item"], expected
        )


def test_a_learning_rate_is_reassigned_and_a_schedule_advances():
    with emulated() as strategy:
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
            [0], [1.0, 0.25]
        )
        layer = tde.DistributedEmbedding(
            [
                tde.FeatureConfig("a", table("a", optimizer="sgd")),
                tde.FeatureConfig(
                    "b", table("b", optimizer=keras.optimizers.SGD(schedule))
                ),
            ]
        )
        inputs = [eight([3]), eight([3])]
        train(strategy, layer, inputs)
        first = layer.get_embedding_tables()
        layer.table_optimizers["a"].learning_rate = 2.0
        train(strategy, layer, inputs)
        second = layer.get_embedding_tables()
        moves = {k: (first[k] - second[k]).numpy()[3, 0] for k in first}
        np.testing.assert_allclose(moves["a"], 2.0 * 0.5, rtol=1e-4)
        np.testing.assert_allclose(moves["b"], 0.25 * 0.5, rtol=1e-4)


def test_placements_are_mixed_in_any_order():
    with emulated(2) as strategy:
        here = table("here", placement="default_device", optimizer="adam")
        layer = tde.DistributedEmbedding(
            {
                "x": tde.FeatureConfig("x", here),
                "y": tde.FeatureConfig("y", table("there")),
                "z": tde.FeatureConfig("z", here),
            }
        )
        inputs = {
            "x": tf.range(ROWS),
            "y": eight([1], [2]),
            "z": tf.range(ROWS),
        }
        found = lookup(strategy, layer, inputs)
        np.testing.assert_allclose(found["z"][1][5], coded(40, 4)[5])
        np.testing.assert_allclose(found["y"][1][1], coded(40, 4)[2])
        train(strategy, layer, inputs, optimizer=keras.optimizers.SGD())
        state = layer.get_optimizer_state()
        assert state["here"]["step"] == state["there"]["step"] == 1


def test_a_ragged_input_of_a_default_device_table_raises():
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(placement="default_device"))
        )
        with pytest.raises(ValueError, match="'item'.*dense"):
            lookup(strategy, layer, eight([1]))


def test_stacking_changes_no_result():
    inputs = [eight([3, 3], [5]), eight([3], [7, 8])]
    results = []
    for stacking in ("auto", None, [["a", "b"]]):
        with emulated() as strategy:
            layer = tde.DistributedEmbedding(
                [
                    tde.FeatureConfig(n, table(n, optimizer="adam"))
                    for n in ("a", "b")
                ],
                table_stacking=stacking,
            )
            train(strategy, layer, inputs, 2)
            results.append(layer.get_embedding_tables())
    for found in results[1:]:
        for name, values in results[0].items():
            np.testing.assert_allclose(found[name], values, atol=1e-6)


def test_tables_of_two_placements_make_no_stack():
    features = [
        tde.FeatureConfig("a", table("a"), (ROWS, 3)),
        tde.FeatureConfig("b", table("b", placement="default_device")),
    ]
    match = r"lists \['a', 'b'\] together, but only \['[ab]'\].*placed alike"
    with emulated(), pytest.raises(ValueError, match=match):
        tde.DistributedEmbedding(features, table_stacking=[["a", "b"]])


def test_without_sparsecores_the_placement_is_named():
    assert not tde.DistributedEmbedding.has_sparsecores()
    with pytest.raises(ValueError, match="sparsecore"):
        tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(placement="sparsecore"))
        )
    with emulated():
        assert tde.DistributedEmbedding.has_sparsecores()
