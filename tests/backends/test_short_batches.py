"""Keras trains with a short last batch on a TPU as on one CPU.

21 examples in batches of 8: the last has 5, of which the chips get different
numbers. Keras does not say so to the trace, which knows no batch size.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests.backends.emulated import coded, emulated

EXAMPLES, BATCH, WIDTH = 21, 8, 3
KINDS = ("dense", "ragged", "sparse")


def features() -> dict[str, tf.Tensor]:
    """The same ids and weights in every kind; row 0 is in the last batch."""
    draw = np.random.default_rng(4)
    ids = draw.integers(0, 30, (EXAMPLES, WIDTH))
    ids[:16][ids[:16] == 0] = 1
    ids[:2, 0] = ids[17, 1] = 0
    weights = draw.choice([0.5, 1.0, 2.0], ids.shape).astype("float32")
    dense = tf.constant(ids)
    return {
        "dense": dense,
        "ragged": tf.RaggedTensor.from_tensor(dense, ragged_rank=1),
        "sparse": tf.sparse.from_dense(dense + 1).with_values(
            tf.reshape(dense, [-1])
        ),
        "weights": tf.constant(weights),
    }


def dataset(labelled: bool = True) -> tf.data.Dataset:
    inputs = features()
    labels = tf.reduce_sum(inputs["dense"], 1, keepdims=True) % 5
    data = tf.data.Dataset.from_tensor_slices(
        (inputs, tf.cast(labels, tf.float32))
    )
    if not labelled:
        data = data.map(lambda x, y: x)
    return data.batch(BATCH)


def model() -> keras.Model:
    """Adam's momentum moves a row at each touch, also by a gradient of 0."""
    keras.utils.set_random_seed(3)
    tables = {
        kind: tde.TableConfig(
            kind,
            30,
            4,
            optimizer="adam",
            combiner="mean",
            initializer=coded(30, 4) / 30,
        )
        for kind in KINDS
    }
    layer = tde.DistributedEmbedding(
        {
            kind: tde.FeatureConfig(kind, tables[kind], (BATCH, WIDTH))
            for kind in KINDS
        },
        name="embedding",
    )
    inputs = {
        kind: keras.Input(
            (None if kind == "ragged" else WIDTH,),
            dtype="int64",
            name=kind,
            **({} if kind == "dense" else {kind: True}),
        )
        for kind in KINDS
    }
    weights = keras.Input((WIDTH,), name="weights")
    outputs = layer(inputs, {"dense": weights, "ragged": None, "sparse": None})
    joined = keras.layers.Concatenate()(list(outputs.values()))
    made = keras.Model(
        {**inputs, "weights": weights},
        keras.layers.Dense(1, name="output")(joined),
    )
    made.compile(
        keras.optimizers.SGD(0.01),
        # A mean of a replica's rows would weigh those of short parts more.
        keras.losses.MeanSquaredError(reduction="sum"),
        metrics=["mse"],
        jit_compile=False,
    )
    return made


def trained(
    strategy: tf.distribute.Strategy | None = None, is_counted: bool = True
) -> dict[str, Any]:
    def fed(data: tf.data.Dataset) -> Any:
        if not is_counted:
            data = data.filter(lambda *_: True)
        return tde.distribute_dataset(data, strategy)

    made = model()
    history = made.fit(fed(dataset()), epochs=2, verbose=0).history
    evaluated = made.evaluate(fed(dataset()), verbose=0, return_dict=True)
    layer = made.get_layer("embedding")
    slots = layer.get_optimizer_state()
    return {
        "losses of fit": history["mse"],
        "loss of evaluate": evaluated["mse"],
        "predictions": made.predict(fed(dataset(labelled=False)), verbose=0),
        **{f"table {k}": v for k, v in layer.get_embedding_tables().items()},
        **{f"velocity of {k}": slots[k]["velocity"] for k in KINDS},
        "steps": [slots[kind]["step"] for kind in KINDS],
    }


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return trained()


@pytest.mark.parametrize(
    "chips,is_counted",
    [
        (1, True),
        (2, True),
        # Of a dataset of unknown length Keras learns the end by its error.
        pytest.param(2, False, marks=pytest.mark.slow),
    ],
)
def test_a_short_last_batch_trains_as_on_one_cpu(chips, is_counted, expected):
    with emulated(chips) as strategy:
        found = trained(strategy, is_counted)
    assert found["predictions"].shape == (EXAMPLES, 1)
    assert found["steps"] == [6, 6, 6]
    for what, value in expected.items():
        np.testing.assert_allclose(
            found[what], value, rtol=2e-5, atol=2e-5, err_msg=what
        )


def dense_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    table = tde.TableConfig("t", 30, 4, optimizer="adam", combiner="sum")
    layer = tde.DistributedEmbedding(
        {
            name: tde.FeatureConfig(name, table, (BATCH,))
            for name in ("column", "flat")
        },
        name="embedding",
    )
    inputs = {
        "column": keras.Input((1,), dtype="int32", name="column"),
        "flat": keras.Input((), dtype="int32", name="flat"),
    }
    outputs = keras.layers.Add()(list(layer(inputs).values()))
    made = keras.Model(inputs, keras.layers.Dense(1)(outputs))
    made.compile(
        keras.optimizers.SGD(0.01),
        keras.losses.MeanSquaredError(reduction="sum"),
        metrics=["mse"],
        jit_compile=False,
    )
    return made


def trained_on_arrays() -> list[Any]:
    ids = features()["dense"].numpy()
    # Keras adds a dimension, removes one, and casts both to int32.
    fed = {"column": ids[:, 0], "flat": ids[:, 1:2]}
    labels = (ids[:, :1] % 5).astype("float32")
    made = dense_model()
    history = made.fit(
        fed, labels, batch_size=BATCH, epochs=2, shuffle=False, verbose=0
    ).history["mse"]
    layer = made.get_layer("embedding")
    return [
        history,
        made.predict(fed, batch_size=BATCH, verbose=0),
        layer.get_embedding_tables()["t"],
    ]


def test_arrays_train_as_on_one_cpu():
    expected = trained_on_arrays()
    with emulated(2):
        found = trained_on_arrays()
    for value, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=2e-5)


def test_ids_that_the_tpu_computes_from_such_a_batch_raise():
    with emulated(2) as strategy:
        table = tde.TableConfig("t", 30, 4)
        layer = tde.DistributedEmbedding(tde.FeatureConfig("f", table, (8, 3)))

        @tf.function
        def step(iterator):
            return strategy.run(
                lambda ids: layer(ids % 7), args=(next(iterator),)
            )

        data = dataset().map(lambda x, y: x["dense"])
        distributed = strategy.experimental_distribute_dataset(data)
        with pytest.raises(ValueError, match="Feature 'f'.*are computed"):
            step(iter(distributed))


@pytest.mark.parametrize("kind", KINDS)
def test_too_many_rows_that_only_the_run_knows_raise(kind):
    with emulated() as strategy:
        table = tde.TableConfig("t", 30, 4)
        layer = tde.DistributedEmbedding(tde.FeatureConfig("f", table, (4, 3)))
        (batch,) = dataset().map(lambda x, y: x[kind]).take(1)
        (spec,) = (dataset().map(lambda x, y: x[kind]).element_spec,)
        step = tf.function(
            lambda ids: strategy.run(layer, args=(ids,)),
            input_signature=[spec],
        )
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=r"Feature .*f.*at most 4 examples. Received: 8",
        ):
            step(batch)
