"""Rows added to fill a batch up touch no table, whatever their ids are."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests.state_formats import assert_close, tables_of
from tf_distembed import real_rows

BATCH = 8
WIDE = 3


def make_model() -> keras.Model:
    keras.utils.set_random_seed(5)
    # Adam moves a row of gradient 0 as well, if it is touched.
    tables = {
        name: tde.TableConfig(
            name, 20, 8, optimizer=keras.optimizers.Adam(0.1), placement=place
        )
        for name, place in (("one", "auto"), ("here", "default_device"))
    }
    layer = tde.DistributedEmbedding(
        {
            "next": tde.FeatureConfig("next", tables["one"], (BATCH,)),
            "seen": tde.FeatureConfig("seen", tables["one"], (BATCH, WIDE)),
            "hour": tde.FeatureConfig("hour", tables["here"], (BATCH,)),
        },
        name="embedding",
    )
    inputs = {
        "next": keras.Input((), dtype="int64", name="next"),
        "seen": keras.Input((WIDE,), dtype="int64", name="seen"),
        "hour": keras.Input((), dtype="int64", name="hour"),
    }
    joined = keras.layers.Concatenate()(list(layer(inputs).values()))
    model = keras.Model(inputs, keras.layers.Dense(1)(joined))
    model.compile("sgd", "mse", jit_compile=False)
    return model


def batches() -> tf.data.Dataset:
    # Id 0 is touched in the first batch, and so has momentum in the last.
    rows = BATCH + 3
    ids = np.arange(rows * WIDE).reshape(rows, WIDE) % 19
    ids[BATCH:] += 1
    inputs = {"next": ids[:, 0], "seen": ids, "hour": ids[:, 1] % 3}
    inputs["hour"][BATCH:] = 2
    labels = (ids.sum(1, keepdims=True) % 5).astype("float32")
    return tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(BATCH)


def test_a_short_last_batch_trains_on_a_tpu_as_on_one_device():
    one = make_model()
    history = tde.fit(one, batches(), epochs=2, verbose=0)
    with tde.testing.sparsecore_emulator(1, 4) as strategy:
        with strategy.scope():
            many = make_model()
        again = tde.fit(many, batches(), epochs=2, verbose=0)
        found = tables_of(many)
    assert_close(found, tables_of(one), 2e-5)
    np.testing.assert_allclose(
        again.history["loss"], history.history["loss"], rtol=2e-5
    )


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("invalid_ids", ["error", "drop"])
def test_ids_of_added_rows_are_no_ids(invalid_ids, jit_compile):
    table = tde.TableConfig("t", 4, 8, optimizer="adam", combiner="sum")
    layer = tde.DistributedEmbedding(
        tde.FeatureConfig("f", table), invalid_ids=invalid_ids
    )
    rows = layer.get_embedding_tables()["t"].numpy()

    @tf.function(jit_compile=jit_compile)
    def look_up(ids, mask):
        with real_rows.marked(mask):
            return layer(ids)

    # The last row's ids would be refused, and one of them counted.
    found = look_up(
        tf.constant([[1, 0], [2, 2], [0, 9]]), tf.constant([1.0, 1.0, 0.0])
    )
    expected = np.stack([rows[1] + rows[0], 2 * rows[2], np.zeros(8)])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert layer.id_statistics()["dropped"] == {"f": 0}
    # Outside, all rows are real again.
    outside = layer(tf.constant([[0, 0]]))
    np.testing.assert_allclose(outside, 2 * rows[:1], rtol=1e-6)
