"""The static batch and the dtypes of a layer on SparseCores."""

from __future__ import annotations

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
    ragged,
    table,
    train,
)

# -- 4. the static batch -----------------------------------------------------


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


def test_an_undeclared_batch_is_that_of_the_first_input():
    with emulated(2) as strategy:
        layer = tde.DistributedEmbedding(tde.FeatureConfig("item", table()))
        lookup(strategy, layer, tf.range(ROWS))
        with pytest.raises(ValueError, match=f"at most {ROWS} examples"):
            lookup(strategy, layer, tf.range(ROWS + 2))


@pytest.mark.parametrize("batch", [3, 6])
def test_a_batch_that_cannot_be_divided_raises_with_the_numbers(batch):
    with (
        emulated(2),
        pytest.raises(ValueError, match=f"multiple of 4.*{batch}"),
    ):
        tde.DistributedEmbedding(tde.FeatureConfig("item", table(), (batch, 3)))


def test_features_of_different_batches_raise():
    features = [
        tde.FeatureConfig("a", table("a"), (ROWS, 3)),
        tde.FeatureConfig("b", table("b"), (2 * ROWS, 3)),
    ]
    match = rf"must declare one global batch size.*'a': {ROWS}, 'b': {2 * ROWS}"
    with emulated(), pytest.raises(ValueError, match=match):
        tde.DistributedEmbedding(features)


def test_an_unknown_number_of_positions_raises():
    feature = tde.FeatureConfig("x", table(), (ROWS, None), (ROWS, None, 4))
    match = r"'x'.*static number of positions.*\(8, None, 4\)"
    with emulated(), pytest.raises(ValueError, match=match):
        tde.DistributedEmbedding(feature)


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


def test_a_short_batch_of_known_size_is_padded_and_cut_back():
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


# -- 5. float32 --------------------------------------------------------------


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
