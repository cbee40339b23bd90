"""The backend of older TPUs, as far as a machine without one shows it.

`TPUEmbedding` can be made without a TPU and then keeps its tables on the
host: the conversion of the configuration and the state are tested so. What a
chip would do is not.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tf_distembed import layer_config
from tf_distembed.backends.tpu_embedding_v1 import TpuEmbeddingV1Backend
from tf_distembed.features import read_features
from tf_distembed.id_statistics import DroppedIds


def coded(rows: int, dim: int) -> np.ndarray:
    return (np.arange(rows)[:, None] + np.arange(dim) / 16).astype("float32")


def backend(
    *configs: tde.FeatureConfig, table_stacking: Any = "auto", **settings: Any
) -> TpuEmbeddingV1Backend:
    features, tables = read_features(
        [((i,), config) for i, config in enumerate(configs)], "error"
    )
    defaults = {
        "update_stats": False,
        "optimizer": None,
        "pipeline_execution_with_tensor_core": False,
        "sparse_core_embedding_config": None,
    }
    return TpuEmbeddingV1Backend(
        features,
        tables,
        layer_config.table_optimizers(tables, None),
        table_stacking,
        layer_config.Settings(
            table_stacking=table_stacking,
            invalid_ids="error",
            **{**defaults, **settings},
        ),
        DroppedIds([feature.name for feature in features], on_host=True),
        "layer",
        "float32",
    )


def table(name: str, **settings: Any) -> tde.TableConfig:
    settings = {"optimizer": "adam", "initializer": coded(10, 4), **settings}
    return tde.TableConfig(name, 10, 4, **settings)


def test_the_configuration_is_converted():
    item = table("item", combiner="sqrtn")
    made = backend(
        tde.FeatureConfig("one", item, (8,), (8, 4)),
        tde.FeatureConfig("each", item, (8, 3), (8, 3, 4)),
        tde.FeatureConfig("other", table("other", optimizer="adagrad")),
    )
    one, each, other = made._embedding._feature_config
    assert one.table is each.table
    assert one.table is not other.table
    assert one.table.combiner == "sqrtn"
    assert (one.table.vocabulary_size, one.table.dim) == (10, 4)
    assert [list(f.output_shape) for f in (one, each)] == [[8], [8, 3]]
    native = tf.tpu.experimental.embedding
    assert isinstance(one.table.optimizer, native.Adam)
    assert not one.table.optimizer.sum_inside_sqrt
    assert isinstance(other.table.optimizer, native.Adagrad)


def test_the_state_is_written_and_read_by_rows_and_slots():
    made = backend(tde.FeatureConfig("x", table("item"), (8,)))
    np.testing.assert_array_equal(
        made.read_rows("item", "values", 0, 10), coded(10, 4)
    )
    made.write_rows("item", "velocity", [9, 2], np.full([2, 4], [[3], [5]]))
    found = made.read_rows("item", "velocity", 0, 10).numpy()
    assert found[9, 0] == 3
    assert found[2, 0] == 5
    assert not found[[0, 1, 3, 4, 5, 6, 7, 8]].any()
    made.write_step("item", 7)
    assert made.read_step("item") == 7


def test_a_frozen_table_takes_steps_of_nothing():
    made = backend(tde.FeatureConfig("x", table("item", trainable=False), (8,)))
    (feature,) = made._embedding._feature_config
    assert feature.table.optimizer.learning_rate == 0.0


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"table_stacking": [["item"]]}, "stacked"),
        ({"update_stats": True}, "update_stats"),
        (
            {
                "sparse_core_embedding_config": (
                    tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig()
                )
            },
            "sparse_core_embedding_config",
        ),
    ],
)
def test_settings_of_sparsecores_raise(settings, named):
    with pytest.raises(ValueError, match=named):
        backend(tde.FeatureConfig("x", table("item"), (8,)), **settings)


def test_momentum_raises():
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    with pytest.raises(ValueError, match="'item'.*momentum"):
        backend(
            tde.FeatureConfig("x", table("item", optimizer=optimizer), (8,))
        )
