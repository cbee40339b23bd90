"""Native configurations, and the settings that only SparseCores have."""

from __future__ import annotations

from typing import Any

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

native = tf.tpu.experimental.embedding


def native_layer(**settings: Any) -> tde.DistributedEmbedding:
    tables = {
        name: native.TableConfig(
            40,
            4,
            name=name,
            combiner="sum",
            initializer=lambda shape, dtype=tf.float32, **_: tf.constant(
                coded(40, 4)
            ),
            optimizer=optimizer,
        )
        for name, optimizer in (("a", native.Adam(0.25)), ("b", None))
    }
    return tde.DistributedEmbedding(
        {
            "x": native.FeatureConfig(tables["a"], name="x"),
            "y": native.FeatureConfig(tables["b"], name="y"),
        },
        **settings,
    )


INPUTS = {"x": eight([3, 3], [5], [], [39]), "y": eight([1], [1, 2])}


def test_native_configurations_train_as_on_the_default_device():
    """With a layer's optimizer, a configuration and pipelining."""
    alone = native_layer(optimizer=keras.optimizers.Adagrad(0.5))
    optimizer = keras.optimizers.SGD(1.0)
    variables = alone.trainable_variables
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [tf.reduce_sum(x) * 0.5 for x in alone(INPUTS).values()]
            )
        optimizer.apply(tape.gradient(loss, variables), variables)
    config = native.SparseCoreEmbeddingConfig(
        max_ids_per_table={"a": 64, "b": 64},
        max_unique_ids_per_table={"a": 64, "b": 64},
        max_ids_per_chip_per_sample=32,
        disable_table_stacking=True,
    )
    with emulated() as strategy:
        layer = native_layer(
            optimizer=keras.optimizers.Adagrad(0.5),
            sparse_core_embedding_config=config,
            pipeline_execution_with_tensor_core=True,
        )
        train(strategy, layer, INPUTS, 2)
        tables, state = (
            layer.get_embedding_tables(),
            layer.get_optimizer_state(),
        )
    for name, value in alone.get_embedding_tables().items():
        assert (value.numpy() != coded(40, 4)).any()
        np.testing.assert_allclose(tables[name], value, atol=2e-5)
    for name, slots in alone.get_optimizer_state().items():
        for slot, value in slots.items():
            np.testing.assert_allclose(state[name][slot], value, atol=2e-5)


def test_pipelining_changes_no_result_of_the_emulator():
    results = []
    for pipelining in (False, True):
        with emulated() as strategy:
            layer = tde.DistributedEmbedding(
                tde.FeatureConfig("item", table(optimizer="adam")),
                pipeline_execution_with_tensor_core=pipelining,
            )
            train(strategy, layer, tf.range(ROWS), 2)
            results.append(layer.get_embedding_tables()["item"])
            assert layer.get_optimizer_state()["item"]["step"] == 2
    np.testing.assert_array_equal(*results)
    assert (results[0].numpy()[:ROWS] != coded(40, 4)[:ROWS]).all()


def test_sparse_core_embedding_config_wins_over_the_tables():
    config = native.SparseCoreEmbeddingConfig(
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


def test_ids_too_many_for_a_chip_are_dropped_where_the_config_allows_it():
    """Those of the last partitions; too many for a partition still raise."""
    config = native.SparseCoreEmbeddingConfig(
        max_ids_per_chip_per_sample=1,
        max_ids_per_table={"item": 2},
        allow_id_dropping=True,
    )
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table()),
            sparse_core_embedding_config=config,
        )
        (output,) = lookup(strategy, layer, tf.constant([1, 2, 3, 4] * 2))
        kept = output.any(1)
        assert kept.any()
        assert not kept.all()
        np.testing.assert_array_equal(
            output[kept], coded(40, 4)[[1, 2, 3, 4] * 2][kept]
        )
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="max_ids_per_partition is 2"
        ):
            lookup(strategy, layer, tf.constant([1, 3, 5, 7] * 2))


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"max_ids_per_table": {"nope": 1}}, "nope"),
        ({"max_unique_ids_per_table": {"nope": 1}}, "nope"),
        (
            {"enable_fast_table_initialization": True},
            "enable_fast_table_initialization",
        ),
    ],
)
def test_a_config_that_cannot_be_honoured_raises(settings, named):
    config = native.SparseCoreEmbeddingConfig(**settings)
    with emulated(), pytest.raises(ValueError, match=named):
        tde.DistributedEmbedding(
            tde.FeatureConfig("item", table(), (ROWS,)),
            sparse_core_embedding_config=config,
        )
