"""Where SparseCore differs, and that it does not elsewhere."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde

ROWS = 8


def coded(rows: int, dim: int) -> np.ndarray:
    """Values that tell row and column."""
    return (np.arange(rows)[:, None] + np.arange(dim) / 16).astype("float32")


def table(name: str = "item", dim: int = 4, **settings: Any) -> tde.TableConfig:
    settings = {"optimizer": "adagrad", "combiner": "sum", **settings}
    rows = settings.pop("rows", 40)
    if "initializer" not in settings:
        settings["initializer"] = coded(rows, dim)
    return tde.TableConfig(name, rows, dim, **settings)


@contextlib.contextmanager
def emulated(chips: int = 1, cores: int = 2):
    with (
        tde.testing.sparsecore_emulator(chips, cores) as strategy,
        strategy.scope(),
    ):
        yield strategy


def ragged(*rows: list[int]) -> tf.RaggedTensor:
    lengths = [len(row) for row in rows]
    flat = [value for row in rows for value in row]
    return tf.RaggedTensor.from_row_lengths(
        tf.constant(flat, tf.int64), lengths
    )


def eight(*rows: list[int]) -> tf.RaggedTensor:
    return ragged(*rows, *[[]] * (ROWS - len(rows)))


def lookup(strategy: Any, layer: Any, inputs: Any, weights: Any = None) -> Any:
    """What one replica, or each of several, gets for its part."""

    @tf.function
    def call(inputs, weights):
        return strategy.run(layer, args=(inputs,), kwargs={"weights": weights})

    return tf.nest.map_structure(
        lambda x: [
            np.asarray(v) for v in strategy.experimental_local_results(x)
        ],
        call(inputs, weights),
    )


def train(
    strategy: Any,
    layer: Any,
    inputs: Any,
    steps: int = 1,
    optimizer: Any = None,
) -> None:
    """Takes steps on the loss sum(outputs * 0.5)."""

    @tf.function
    def call(inputs):
        def step(inputs):
            with tf.GradientTape() as tape:
                outputs = tf.nest.flatten(layer(inputs, training=True))
                loss = tf.add_n([tf.reduce_sum(x) * 0.5 for x in outputs])
            variables = layer.trainable_variables
            gradients = tape.gradient(loss, variables)
            if optimizer is not None:
                optimizer.apply(gradients, variables)

        strategy.run(step, args=(inputs,))

    for _ in range(steps):
        call(inputs)


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


# -- 2. no gradient reaches weights -----------------------------------------


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


# -- 4. the static batch ------------------------------------------------------


def test_the_batch_comes_from_the_declared_shape():
    with emulated(2) as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(), (2 * ROWS, 3))
        )
        np.testing.assert_array_equal(
            layer.get_embedding_tables()["item"], coded(40, 4)
        )
        (first, second) = lookup(strategy, layer, eight([7], [], [1, 1, 1, 1]))
        np.testing.assert_allclose(first, second)
        np.testing.assert_allclose(first[2], 3 * coded(40, 4)[1])


@pytest.mark.parametrize("batch", [3, 6])
def test_a_batch_that_cannot_be_divided_raises_with_the_numbers(batch):
    with (
        emulated(2),
        pytest.raises(ValueError, match=f"multiple of 4.*{batch}"),
    ):
        tde.DistributedEmbedding(tde.FeatureConfig("item", table(), (batch, 3)))


def test_an_unknown_batch_raises():
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(tde.FeatureConfig("item", table()))

        @tf.function(
            input_signature=[tf.RaggedTensorSpec([None, None], tf.int64, 1)]
        )
        def call(inputs):
            return strategy.run(layer, args=(inputs,))

        with pytest.raises(ValueError, match="static batch"):
            call(eight([1]))


def test_a_short_batch_is_padded_and_cut_back():
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(optimizer="sgd"), (ROWS, 3))
        )
        short = ragged([3], [3, 5], [])
        (output,) = lookup(strategy, layer, short)
        assert output.shape == (3, 4)
        np.testing.assert_allclose(output[1], coded(40, 4)[[3, 5]].sum(0))
        train(strategy, layer, short)
        moved = coded(40, 4) - layer.get_embedding_tables()["item"].numpy()
        np.testing.assert_allclose(moved[3], 2 * 0.01 * 0.5, atol=2e-5)
        assert not moved[[0, 1, 2, 4]].any()


def test_the_global_batch_in_a_replica_is_named():
    with emulated(2) as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(), (2 * ROWS,))
        )
        with pytest.raises(ValueError, match="That is the global batch"):
            lookup(strategy, layer, tf.range(2 * ROWS))


# -- 5. float32 ---------------------------------------------------------------


def test_outputs_follow_the_policy_and_tables_are_float32():
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(), (ROWS,)), dtype="mixed_bfloat16"
        )
        (output,) = strategy.experimental_local_results(
            tf.function(lambda x: strategy.run(layer, args=(x,)))(
                tf.range(ROWS)
            )
        )
        assert output.dtype == tf.bfloat16
        assert layer.get_embedding_tables()["item"].dtype == tf.float32


def test_another_variable_dtype_raises():
    with emulated(), pytest.raises(ValueError, match="bfloat16"):
        tde.DistributedEmbedding(
            tde.FeatureConfig("item", table()), dtype="bfloat16"
        )


# -- 6. what SparseCores cannot do -------------------------------------------


@pytest.mark.parametrize(
    "optimizer, named",
    [
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), "momentum"),
        (
            lambda: keras.optimizers.Ftrl(
                l2_shrinkage_regularization_strength=0.1
            ),
            "l2_shrinkage",
        ),
        (lambda: None, "own optimizer"),
    ],
)
def test_optimizers_it_cannot_do_raise(optimizer, named):
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


# -- 7. pipelining ------------------------------------------------------------


def test_pipelining_is_passed_on():
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(optimizer="sgd")),
            pipeline_execution_with_tensor_core=True,
        )
        train(strategy, layer, tf.range(ROWS))
        assert layer.get_optimizer_state()["item"]["step"] == 1


# -- 8. size and shards -------------------------------------------------------


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


# -- 9. one step count a stack ------------------------------------------------


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


# -- limits -------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting, needed",
    [("max_ids_per_partition", 4), ("max_unique_ids_per_partition", 2)],
)
def test_a_limit_that_is_too_small_is_named_with_what_is_needed(
    setting, needed
):
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(**{setting: 1}))
        )
        # Two SparseCores: even ids are one partition. The samples 0..3 of
        # the first SparseCore hold id 2 in three of them, and id 4.
        inputs = eight([2, 2], [2], [4], [2])
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            lookup(strategy, layer, inputs)
        message = str(raised.value)
        assert "item" in message
        assert f"{setting} is 1 " in message
        assert f"and {needed} are needed" in message


def test_update_stats_measures_what_batches_need():
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table()), update_stats=True
        )
        lookup(strategy, layer, eight([2, 2], [2], [4], [2]))
        lookup(strategy, layer, eight([1]))
        (limits,) = layer.id_statistics(reset=True)["limits"]
        assert limits == {
            "tables": ["item"],
            "max_ids_per_partition": 4,
            "max_unique_ids_per_partition": 2,
        }
        (limits,) = layer.id_statistics()["limits"]
        assert limits["max_ids_per_partition"] == 0


def test_sparse_core_embedding_config_wins_over_the_tables():
    config = tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(
        max_ids_per_table={"item": 1}, disable_table_stacking=True
    )
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table()),
            sparse_core_embedding_config=config,
        )
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="max_ids_per_partition is 1"
        ):
            lookup(strategy, layer, eight([2], [4]))


def test_sparse_core_embedding_config_with_an_unknown_table_raises():
    config = tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(
        max_ids_per_table={"nope": 1}
    )
    with emulated(), pytest.raises(ValueError, match="nope"):
        tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(), (ROWS,)),
            sparse_core_embedding_config=config,
        )


# -- ids ----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 40, 2**32 + 1])
def test_ids_are_checked_on_the_host_before_any_cast(bad):
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            [
                tde.FeatureConfig("a", table("a")),
                tde.FeatureConfig("b", table("b")),
            ]
        )
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=f"Feature .*a.*id {bad} "
        ):
            lookup(strategy, layer, [eight([bad]), eight([1])])


def test_dropped_ids_are_counted_on_the_host_for_all_chips():
    with emulated(2) as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table()), invalid_ids="drop"
        )
        first, second = lookup(strategy, layer, eight([3, -1, 40], [99]))
        np.testing.assert_allclose(first[0], coded(40, 4)[3])
        assert not first[1].any()
        np.testing.assert_allclose(first, second)
        assert layer.id_statistics()["dropped"] == {"item": 6}


# -- values, optimizers and placement -----------------------------------------


def test_initial_values_equal_the_default_device_s():
    def make():
        keras.utils.set_random_seed(3)
        return tde.DistributedEmbedding(
            [
                tde.FeatureConfig(
                    name, table(name, initializer=None, rows=100), (2 * ROWS,)
                )
                for name in ("a", "b")
            ]
        ).get_embedding_tables()

    expected = make()
    with emulated(2):
        found = make()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


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


def test_without_sparsecores_the_placement_is_named():
    assert not tde.DistributedEmbedding.has_sparsecores()
    with pytest.raises(ValueError, match="sparsecore"):
        tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(placement="sparsecore"))
        )
    with emulated():
        assert tde.DistributedEmbedding.has_sparsecores()
