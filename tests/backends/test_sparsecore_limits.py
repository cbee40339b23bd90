"""What SparseCore buffers hold, and the check of ids before it."""

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
    table,
)

# -- limits ------------------------------------------------------------------


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
        message = str(raised.value).replace("\\", "")
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


def test_the_limits_of_a_stack_are_the_sums_of_its_tables():
    """And the message names them all, with the setting to raise."""
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            [
                tde.FeatureConfig("x", table("a", max_ids_per_partition=1)),
                tde.FeatureConfig("y", table("b", max_ids_per_partition=2)),
            ]
        )
        # One partition: the rotation of the second table is that of a chip.
        fits = [eight([2], [4]), eight([2])]
        lookup(strategy, layer, fits)
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            lookup(strategy, layer, [eight([2], [4]), eight([2], [6])])
        message = str(raised.value).replace("\\", "")
        assert "the stack of tables ['a', 'b']" in message
        assert "max_ids_per_partition is 3 (the sum over" in message
        assert "and 4 are needed" in message


def test_the_ids_of_a_chip_are_limited_too():
    config = tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(
        max_ids_per_chip_per_sample=1
    )
    with emulated() as strategy:
        layer = tde.DistributedEmbedding(
            tde.FeatureConfig("item", table()),
            sparse_core_embedding_config=config,
        )
        # Each of the four partitions in use takes 8 of the chip's 8 places.
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            lookup(strategy, layer, tf.range(ROWS))
        message = str(raised.value).replace("\\", "")
        assert "stack of tables ['item']" in message
        assert "max_ids_per_chip_per_sample (of sparse_core_" in message
        assert "is 1 " in message
        assert "and 4 are needed" in message


# -- ids ---------------------------------------------------------------------


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
