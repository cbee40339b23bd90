"""TPUEmbeddingV2 on the emulator takes the steps of the dense reference."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_distembed.testing as emulation
from tests.testing.sparsecore_reference import (
    Bags,
    Table,
    read_table,
    write_table,
)

api = tf.tpu.experimental.embedding

BATCH = 8  # Samples a chip.
RATE = 0.3
COMBINERS = ("sum", "mean", "sqrtn")
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


def optimizers(rate) -> dict[str, object]:
    return {
        "sgd": api.SGD(rate),
        "adagrad": api.Adagrad(RATE, initial_accumulator_value=0.1),
        "momentum": api.AdagradMomentum(
            RATE,
            momentum=0.8,
            use_nesterov=True,
            exponent=2,
            beta2=0.9,
            epsilon=1e-3,
        ),
        "adam": api.Adam(
            RATE,
            beta_1=0.8,
            beta_2=0.9,
            epsilon=1e-3,
            sum_inside_sqrt=False,
        ),
        "ftrl": api.FTRL(
            RATE,
            l1_regularization_strength=0.01,
            l2_regularization_strength=0.02,
            beta=0.05,
            initial_accumulator_value=0.1,
        ),
    }


def bags(rng: np.random.Generator, kind: str, size: int) -> Bags:
    """Random ids and weights, with duplicates and empty samples."""
    if kind == "dense":
        ids = [[int(i)] for i in rng.integers(0, size, BATCH)]
        return Bags(ids, [[1.0]] * BATCH)
    lengths = rng.integers(0, 5, BATCH)
    lengths[0], lengths[-1] = 3, 0
    ids = [rng.integers(0, size, n).tolist() for n in lengths]
    ids[0] = [ids[0][0], ids[0][1], ids[0][0]]
    return Bags(ids, [(rng.random(n) + 0.1).tolist() for n in lengths])


def tensors(given: Bags, kind: str):
    """The ids and weights as TensorFlow takes them."""
    if kind == "dense":
        return tf.constant([ids[0] for ids in given.ids], tf.int64), None
    ids = tf.ragged.constant(given.ids, tf.int64, ragged_rank=1)
    weights = tf.ragged.constant(given.weights, tf.float32, ragged_rank=1)
    if kind == "sparse":
        return ids.to_sparse(), weights.to_sparse()
    return ids, weights


ALL = ("sgd", "adagrad", "momentum", "adam", "ftrl")


@pytest.mark.parametrize(
    "chips, cores, used_optimizers",
    [(1, 4, ALL), (2, 4, ALL), (2, 2, ("sgd", "adam"))],
    ids=["1x4", "2x4", "2x2"],
)
def test_steps_equal_the_dense_reference(
    chips: int, cores: int, used_optimizers: tuple[str, ...]
) -> None:
    """All optimizers and combiners, three kinds of input, in one layer.

    Each optimizer has two tables, which TensorFlow stacks, and one of them is
    shared by two features; one more table is wider and stays alone.
    """
    rng = np.random.default_rng(chips * 10 + cores)
    with emulation.sparsecore_emulator(chips, cores) as strategy:
        with strategy.scope():
            rate = tf.Variable(RATE, trainable=False)
        optimizer_of = optimizers(lambda: rate)
        tables, features, kinds = {}, {}, {}
        for number, key in enumerate(used_optimizers):
            optimizer = optimizer_of[key]
            sizes = [("x", 40, 6), ("y", 100, 8)]
            if key == "sgd":
                sizes.append(("z", 77, 16))
            for shift, (letter, size, width) in enumerate(sizes):
                table = api.TableConfig(
                    size,
                    width,
                    optimizer=optimizer,
                    combiner=COMBINERS[(number + shift) % 3],
                    name=f"{key}.{letter}",
                )
                tables[table.name] = table
                uses = ["ragged", "dense"] if letter == "x" else ["sparse"]
                for kind in uses:
                    name = f"{table.name}.{kind}"
                    kinds[name] = kind
                    features[name] = api.FeatureConfig(
                        table, output_shape=[BATCH], name=name
                    )
        with strategy.scope():
            embedding = api.TPUEmbeddingV2(features, None)
            embedding.build()
        slot_names = {
            name: table.optimizer._slot_names()
            for name, table in tables.items()
        }
        reference = {}
        for name, table in tables.items():
            values = rng.normal(size=(table.vocabulary_size, table.dim))
            write_table(embedding, name, values)
            np.testing.assert_allclose(
                read_table(embedding, name), values, rtol=1e-6
            )
            reference[name] = Table(
                read_table(embedding, name),
                [read_table(embedding, name, s) for s in slot_names[name]],
            )
        # The two tables of an optimizer are stacked.
        assert len(embedding.embedding_tables) == len(used_optimizers) + 1

        @tf.function
        def step(ids, weights, gradients):
            def replica(ids, weights, gradients):
                activations, lookups = embedding(ids, weights)
                embedding.apply_gradients(gradients, lookups)
                return activations

            return strategy.run(replica, args=(ids, weights, gradients))

        def distributed(per_chip):
            return strategy.experimental_distribute_values_from_function(
                lambda context: per_chip[context.replica_id_in_sync_group]
            )

        for number in range(2):
            if number == 1:
                rate.assign(0.1)
            used = [
                {
                    name: bags(rng, kinds[name], f.table.vocabulary_size)
                    for name, f in features.items()
                }
                for _ in range(chips)
            ]
            given = [
                {name: tensors(b, kinds[name]) for name, b in chip.items()}
                for chip in used
            ]
            gradients = [
                {
                    name: rng.normal(size=(BATCH, f.table.dim))
                    for name, f in features.items()
                }
                for _ in range(chips)
            ]
            activations = step(
                {
                    name: distributed([chip[name][0] for chip in given])
                    for name in features
                },
                {
                    name: None
                    if kinds[name] == "dense"
                    else distributed([chip[name][1] for chip in given])
                    for name in features
                },
                {
                    name: distributed(
                        [tf.constant(c[name], tf.float32) for c in gradients]
                    )
                    for name in features
                },
            )
            for name, feature in features.items():
                table = reference[feature.table.name]
                combiner = feature.table.combiner
                got = strategy.experimental_local_results(activations[name])
                for chip in range(chips):
                    np.testing.assert_allclose(
                        got[chip],
                        table.lookup(used[chip][name], combiner),
                        err_msg=f"{name}, chip {chip}, step {number}",
                        **TOLERANCE,
                    )
                    table.accumulate(
                        used[chip][name], combiner, gradients[chip][name]
                    )
            for name, table in reference.items():
                is_sgd = name.startswith("sgd")
                table.step(
                    tables[name].optimizer,
                    float(rate.numpy()) if is_sgd else RATE,
                )
                for slot, expected in zip(
                    ["parameters", *slot_names[name]],
                    [table.values, *table.slots],
                    strict=True,
                ):
                    np.testing.assert_allclose(
                        read_table(embedding, name, slot),
                        expected,
                        err_msg=f"{name}, {slot}, step {number}",
                        **TOLERANCE,
                    )


def test_rows_without_an_id_keep_every_bit() -> None:
    table = api.TableConfig(64, 8, name="t", combiner="sum")
    feature = api.FeatureConfig(table, output_shape=[4])
    with emulation.sparsecore_emulator(2) as strategy:
        with strategy.scope():
            embedding = api.TPUEmbeddingV2(feature, api.Adam(0.1))
        before = read_table(embedding, "t")

        @tf.function
        def step(ids):
            def replica(ids):
                activations, lookups = embedding(ids)
                embedding.apply_gradients(activations, lookups)

            strategy.run(replica, args=(ids,))

        step(tf.constant([3, 3, 8, 63], tf.int64))
        after = read_table(embedding, "t")
    moved = np.flatnonzero(np.any(before != after, axis=1))
    assert moved.tolist() == [3, 8, 63]


def test_quantized_lookup_rounds_to_the_buckets() -> None:
    table = api.TableConfig(
        16,
        8,
        name="t",
        combiner="sum",
        quantization_config=api.QuantizationConfig(5, -1.0, 1.0),
    )
    with emulation.sparsecore_emulator() as strategy:
        with strategy.scope():
            embedding = api.TPUEmbeddingV2(
                api.FeatureConfig(table, output_shape=[4]), api.SGD(0.1)
            )
            embedding.build()
        values = np.linspace(-2, 2, 16 * 8).reshape(16, 8)
        write_table(embedding, "t", values)
        function = tf.function(
            lambda ids: strategy.run(lambda i: embedding(i)[0], args=(ids,))
        )
        got = function(tf.constant([0, 5, 9, 15]))
    expected = np.round(np.clip(values[[0, 5, 9, 15]], -1, 1) * 2) / 2
    np.testing.assert_allclose(got, expected)
