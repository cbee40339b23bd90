"""`EmbedReduce`: a Keras embedding whose rows are combined.

Expected values come from NumPy formulas written here, or from
`tf.nn.embedding_lookup_sparse`, never from the layer's own modules.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde

ROWS = np.arange(20, dtype=np.float32).reshape(5, 4) / 7 + 0.25

#  ids              weights
#  [1, 1, 3]        [0.5, 2.0, -1.0]
#  []               []
#  [4, 2]           [1.0, 3.0]
#  [2]              [0.0]
IDS = [[1, 1, 3], [], [4, 2], [2]]
WEIGHTS = [[0.5, 2.0, -1.0], [], [1.0, 3.0], [0.0]]


def combined(ids: Any, weights: Any, combiner: str, rows: Any = ROWS) -> Any:
    """The rule, bag by bag."""
    outputs = []
    for bag, own in zip(ids, weights, strict=True):
        w = np.asarray(own, np.float32)
        total = (w[:, np.newaxis] * rows[list(bag)]).sum(0)
        below = {
            "sum": 1.0,
            "mean": w.sum(),
            "sqrtn": np.sqrt((w**2).sum()),
        }[combiner]
        outputs.append(total / below if below else np.zeros_like(total))
    return np.stack(outputs)


def ones(ids: Any) -> Any:
    return [[1.0] * len(bag) for bag in ids]


def ragged(rows: Any, dtype: Any = tf.int64) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_lengths(
        tf.constant([x for row in rows for x in row], dtype),
        [len(row) for row in rows],
    )


def sparse(rows: Any, dtype: Any = tf.int64) -> tf.SparseTensor:
    indices = [[i, j] for i, row in enumerate(rows) for j in range(len(row))]
    return tf.SparseTensor(
        indices,
        tf.constant([x for row in rows for x in row], dtype),
        [len(rows), 3],
    )


# One bit of rounding, also where positive and negative terms cancel.
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
KINDS = {"ragged": ragged, "sparse": sparse}
COMBINERS = ("mean", "sum", "sqrtn")


def layer_of(combiner: str = "mean", **settings: Any) -> tde.EmbedReduce:
    return tde.EmbedReduce(5, 4, weights=ROWS, combiner=combiner, **settings)


# -- Looking up ----------------------------------


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_and_sparse_follow_the_formulas(
    kind: str, combiner: str
) -> None:
    layer = layer_of(combiner)
    output = layer(KINDS[kind](IDS))
    np.testing.assert_allclose(
        output, combined(IDS, ones(IDS), combiner), **CLOSE
    )
    weighted = layer(KINDS[kind](IDS), KINDS[kind](WEIGHTS, tf.float32))
    np.testing.assert_allclose(
        weighted, combined(IDS, WEIGHTS, combiner), **CLOSE
    )


@pytest.mark.parametrize("combiner", COMBINERS)
def test_dense_ids_reduce_over_the_second_dimension(combiner: str) -> None:
    ids, weights = [[1, 1, 3], [4, 2, 0]], [[0.5, 2.0, -1.0], [1.0, 3.0, 0.0]]
    output = layer_of(combiner)(
        tf.constant(ids), weights=tf.constant(weights, tf.float64)
    )
    np.testing.assert_allclose(
        output, combined(ids, weights, combiner), **CLOSE
    )


@pytest.mark.parametrize("combiner", COMBINERS)
def test_one_id_an_example_is_a_bag_of_one(combiner: str) -> None:
    layer = layer_of(combiner)
    ids, weights = tf.constant([3, 0, 3]), tf.constant([2.0, 0.0, -1.0])
    np.testing.assert_array_equal(layer(ids), ROWS[[3, 0, 3]])
    expected = combined([[3], [0], [3]], [[2.0], [0.0], [-1.0]], combiner)
    np.testing.assert_allclose(layer(ids, weights), expected, **CLOSE)
    np.testing.assert_allclose(
        layer(ids[:, tf.newaxis], weights[:, tf.newaxis]), expected, **CLOSE
    )


@pytest.mark.parametrize("combiner", COMBINERS)
def test_it_agrees_with_tensorflow(combiner: str) -> None:
    ids, weights = [[1, 1, 3], [4, 2]], [[0.5, 2.0, 1.0], [1.0, 3.0]]
    expected = tf.nn.embedding_lookup_sparse(
        ROWS, sparse(ids), sparse(weights, tf.float32), combiner=combiner
    )
    np.testing.assert_allclose(
        layer_of(combiner)(sparse(ids), sparse(weights, tf.float32)),
        expected,
        **CLOSE,
    )


def test_an_empty_batch_gives_no_rows() -> None:
    assert layer_of()(tf.zeros([0], tf.int32)).shape == (0, 4)
    assert layer_of()(ragged([])).shape == (0, 4)


def test_lists_and_arrays_are_ids() -> None:
    layer = layer_of()
    np.testing.assert_allclose(
        layer([[1, 1, 3], [4]]),
        combined([[1, 1, 3], [4]], [[1] * 3, [1]], "mean"),
        **CLOSE,
    )
    np.testing.assert_array_equal(layer(np.array([2, 4])), ROWS[[2, 4]])


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "uint64"]
)
def test_every_integer_dtype(dtype: str) -> None:
    np.testing.assert_array_equal(
        layer_of()(tf.constant([4, 0], dtype)), ROWS[[4, 0]]
    )


# -- mask_zero ----------------------------------


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_mask_zero_takes_id_0_out_of_its_example(
    combiner: str, weighted: bool
) -> None:
    padded = tf.constant([[3, 0, 1], [0, 0, 0], [2, 2, 0]])
    weights = [[2.0, 5.0, 0.5], [1.0, 2.0, 3.0], [1.0, -3.0, 9.0]]
    kept = [[3, 1], [], [2, 2]]
    kept_weights = [[2.0, 0.5], [], [1.0, -3.0]]
    layer = layer_of(combiner, mask_zero=True)
    output = layer(padded, tf.constant(weights) if weighted else None)
    expected = combined(
        kept, kept_weights if weighted else ones(kept), combiner
    )
    np.testing.assert_allclose(output, expected, **CLOSE)
    # The same under XLA, where nothing can be removed.
    compiled = tf.function(lambda x, w: layer(x, w), jit_compile=True)
    np.testing.assert_allclose(
        compiled(padded, tf.constant(weights) if weighted else None),
        expected,
        **CLOSE,
    )


def test_mask_zero_of_every_kind_leaves_row_0_alone() -> None:
    layer = layer_of("sum", mask_zero=True)
    ids = [[0, 3], [0], [1, 0, 1]]
    one_each = tf.constant([0, 3])
    for given in (ragged(ids), sparse(ids), one_each):
        with tf.GradientTape() as tape:
            output = layer(given)
            loss = tf.reduce_sum(output)
        gradient = tape.gradient(loss, layer.trainable_variables)[0]
        np.testing.assert_array_equal(gradient[0], np.zeros(4))
        assert np.all(gradient[3] == 1)
    np.testing.assert_array_equal(layer(one_each)[0], np.zeros(4))


def test_no_mask_goes_on_to_the_next_layer() -> None:
    seen = keras.Input([3], dtype="int32")
    pooled = layer_of(mask_zero=True)(seen)
    # A [B, 3] mask beside a [B, 4] tensor would be refused by a Dense of
    # its own, or scale its loss.
    model = keras.Model(seen, keras.layers.Dense(1)(pooled))
    model.compile("sgd", "mse")
    ids, labels = np.array([[1, 0, 0], [2, 3, 0]]), np.ones([2, 1])
    expected = np.mean((model.predict(ids, verbose=0) - labels) ** 2)
    loss = model.evaluate(ids, labels, verbose=0)
    np.testing.assert_allclose(loss, expected, **CLOSE)


# -- Training ----------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.SGD(0.5),
        keras.optimizers.Adagrad(0.5),
        keras.optimizers.Adam(0.5, clipnorm=0.01),
    ],
    ids=lambda optimizer: optimizer.name,
)
def test_the_gradients_of_a_repeated_id_are_summed_first(
    optimizer: Any,
) -> None:
    def trained(lookup: Any, weight: keras.Variable) -> Any:
        rule = type(optimizer).from_config(optimizer.get_config())
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(lookup() ** 2)
            rule.apply([tape.gradient(loss, weight.value)], [weight])
        return weight.numpy()

    layer = layer_of("mean")
    actual = trained(lambda: layer(ragged(IDS)), layer.embeddings)
    # The same as one dense product, whose gradient has nothing to repeat.
    counts = np.zeros([4, 5], np.float32)
    for i, bag in enumerate(IDS):
        np.add.at(counts[i], bag, 1 / len(bag) if bag else 0)
    dense = keras.Variable(ROWS)
    expected = trained(lambda: tf.matmul(counts, dense.value), dense)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_gradients_reach_the_weights() -> None:
    layer = layer_of("mean")
    weights = tf.Variable([[0.5, 2.0], [1.0, 0.0]])
    ids = tf.constant([[1, 3], [2, 2]])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(ids, weights)[:, 0])
    gradient = tape.gradient(loss, weights).numpy()
    # d/dw_i of Σ w·e / Σ w is (e_i - output) / Σ w.
    e, w = ROWS[ids.numpy(), 0], weights.numpy()
    total = w.sum(1, keepdims=True)
    expected = (e - (w * e).sum(1, keepdims=True) / total) / total
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_zero_denominators_have_zero_gradients() -> None:
    for combiner in ("mean", "sqrtn"):
        layer = layer_of(combiner)
        weights = tf.constant([[0.0, 0.0], [0.0, 0.0]])
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_sum(layer(tf.constant([[1, 3], [2, 2]]), weights))
        to_table, to_weights = tape.gradient(
            loss, [layer.embeddings.value, weights]
        )
        np.testing.assert_array_equal(to_table, np.zeros([5, 4]))
        np.testing.assert_array_equal(to_weights, np.zeros([2, 2]))


def test_constraint_and_regularizer_work_as_in_keras() -> None:
    layer = layer_of(
        embeddings_regularizer=keras.regularizers.L2(0.1),
        embeddings_constraint="non_neg",
    )
    layer(tf.constant([1]))
    np.testing.assert_allclose(
        layer.losses[0], 0.1 * np.sum(ROWS**2), rtol=1e-5
    )
    optimizer = keras.optimizers.SGD(100.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1])))
    optimizer.apply(
        tape.gradient(loss, [v.value for v in layer.trainable_variables]),
        layer.trainable_variables,
    )
    np.testing.assert_array_equal(layer.embeddings.numpy()[1], np.zeros(4))


def test_frozen_it_is_looked_up_and_not_trained() -> None:
    layer = layer_of(trainable=False)
    assert layer.trainable_variables == []
    np.testing.assert_array_equal(layer(tf.constant([2])), ROWS[[2]])


def test_lora_adds_its_product_to_the_rows() -> None:
    layer = layer_of("sum")
    layer.enable_lora(2)
    layer.lora_embeddings_b.assign(np.ones([2, 4], np.float32))
    a = layer.lora_embeddings_a.numpy()
    rows = ROWS + a @ np.ones([2, 4], np.float32)
    with tf.GradientTape() as tape:
        output = layer(ragged(IDS))
        loss = tf.reduce_sum(output)
    expected = combined(IDS, ones(IDS), "sum", rows)
    np.testing.assert_allclose(output, expected, rtol=1e-5)
    variables = [v.value for v in layer.trainable_variables]
    gradients = tape.gradient(loss, variables)
    assert [g.shape for g in gradients] == [(5, 2), (2, 4)]


def test_mirrored_replicas_train_one_table(
    mirrored: tf.distribute.Strategy,
) -> None:
    with mirrored.scope():
        layer = layer_of("sum")
        optimizer = keras.optimizers.Adagrad(0.5)
        optimizer.build(layer.trainable_variables)
    single = layer_of("sum")
    alone = keras.optimizers.Adagrad(0.5)
    parts = [ragged([[1, 1], [3]]), ragged([[1, 4], []])]

    def step(model: Any, rule: Any, ids: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(ids) ** 2)
        variables = model.trainable_variables
        rule.apply(tape.gradient(loss, [v.value for v in variables]), variables)

    @tf.function
    def both(ids: Any) -> None:
        mirrored.run(step, args=(layer, optimizer, ids))

    both(
        mirrored.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )
    )
    step(single, alone, tf.concat(parts, 0))
    np.testing.assert_allclose(
        layer.embeddings.value.values[0].numpy(),
        single.embeddings.numpy(),
        **CLOSE,
    )


# -- Keras' contract ----------------------------------


@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_a_saved_model_looks_up_the_same(kind: str, tmp_path: Any) -> None:
    seen = keras.Input(
        [None],
        dtype="int64",
        ragged=kind == "ragged",
        sparse=kind == "sparse",
        name="seen",
    )
    pooled = layer_of("sqrtn", name="pooled")(seen)
    assert pooled.shape == (None, 4)
    assert not pooled.ragged
    assert not pooled.sparse
    model = keras.Model(seen, keras.layers.Dense(2)(pooled))
    ids = [[1, 3], [4, 4]]
    batch = tf.constant(ids) if kind == "dense" else KINDS[kind](ids)
    expected = model(batch)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(batch), expected)
    assert again.get_layer("pooled").combiner == "sqrtn"


def test_weights_may_be_keras_tensors() -> None:
    ids = keras.Input([None], dtype="int32", ragged=True)
    weights = keras.Input([None], dtype="float32", ragged=True)
    model = keras.Model([ids, weights], layer_of("sum")(ids, weights=weights))
    output = model([ragged(IDS, tf.int32), ragged(WEIGHTS, tf.float32)])
    np.testing.assert_allclose(output, combined(IDS, WEIGHTS, "sum"), **CLOSE)


def test_get_config_round_trip() -> None:
    layer = tde.EmbedReduce(
        7,
        3,
        embeddings_initializer="normal",
        embeddings_regularizer="l2",
        mask_zero=True,
        combiner="sum",
        name="tags",
        dtype="mixed_bfloat16",
    )
    config = layer.get_config()
    again = tde.EmbedReduce.from_config(config)
    assert again.get_config() == config
    assert (again.combiner, again.mask_zero, again.name) == (
        "sum",
        True,
        "tags",
    )
    once_more = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(layer)
    )
    assert isinstance(once_more, tde.EmbedReduce)


def test_it_takes_the_place_of_an_embedding() -> None:
    layer = tde.EmbedReduce(7, 3, name="tags")
    assert isinstance(layer, keras.layers.Embedding)
    assert layer.combiner == "mean"
    layer.build()
    assert [tuple(v.shape) for v in layer.weights] == [(7, 3)]
    assert layer.weights[0].path == "tags/embeddings"
    assert layer.compute_output_shape((8, 5)) == (8, 3)
    assert layer.compute_output_shape((8,)) == (8, 3)


def test_a_mixed_policy_combines_in_the_weights_dtype() -> None:
    """Also inside a layer that casts what it reads."""

    class Outer(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__(dtype="mixed_bfloat16")
            self.inner = layer_of("sum", dtype="mixed_bfloat16")

        def call(self, ids: Any) -> Any:
            return self.inner(ids)

    ids = tf.constant([[1, 3, 3]])
    expected = tf.cast(ROWS[[1, 3, 3]].sum(0, keepdims=True), tf.bfloat16)
    for layer in (layer_of("sum", dtype="mixed_bfloat16"), Outer()):
        output = layer(ids)
        assert output.dtype == tf.bfloat16
        np.testing.assert_array_equal(
            tf.cast(output, tf.float32), tf.cast(expected, tf.float32)
        )


def test_xla_compiles_dense_ids_and_leaves_bad_ones_out() -> None:
    layer = layer_of("mean")
    compiled = tf.function(layer, jit_compile=True)
    np.testing.assert_allclose(
        compiled(tf.constant([[1, 3], [-1, 2], [9, 9]])),
        combined([[1, 3], [2], []], [[1, 1], [1], []], "mean"),
        **CLOSE,
    )
    assert layer.supports_jit
    layer(ragged(IDS))
    assert not layer.supports_jit


# -- What is refused ----------------------------------


@pytest.mark.parametrize("bad", [-1, 5, 2**32 + 1])
@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_ids_outside_the_table_raise(bad: int, kind: str) -> None:
    layer = layer_of(name="tags")
    ids = [[1, bad], [2, 3]]
    batch = tf.constant(ids, tf.int64) if kind == "dense" else KINDS[kind](ids)
    for call in (layer, tf.function(layer)):
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=rf"Layer .*tags.*: input_dim=5, so ids run from 0 to 4. "
            rf"Received: id {bad} \(1 such ids in this batch\). Fix the ids, "
            "or raise input_dim.",
        ):
            call(batch)


def test_an_id_outside_the_table_raises_beside_padding() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="id 7"):
        layer_of(mask_zero=True)(tf.constant([[0, 7]]))


@pytest.mark.parametrize("dtype", ["float32", "bool", "string"])
def test_ids_must_be_integers(dtype: str) -> None:
    ids = tf.constant(["a"]) if dtype == "string" else tf.zeros([1], dtype)
    with pytest.raises(TypeError, match="Layer 'tags': ids must have an int"):
        layer_of(name="tags")(ids)


def test_a_sequential_without_an_input_is_told_the_cure() -> None:
    model = keras.Sequential([layer_of(name="tags")])
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="dtype='int64'"):
        model.fit(np.ones([2, 3]), np.ones([2, 4]), verbose=0)


def test_weights_must_lie_beside_the_ids() -> None:
    layer = layer_of(name="tags")
    with pytest.raises(ValueError, match="Layer 'tags': weights must be of"):
        layer(ragged(IDS), tf.zeros([4, 3]))
    with pytest.raises(ValueError, match="Layer 'tags': weights must have th"):
        layer(tf.constant([[1, 2], [3, 4]]), tf.constant([1.0, 2.0]))
    other_rows = ragged([[1.0], [1.0, 1.0], [1.0], [1.0, 1.0]], tf.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="row_splits"):
        layer(ragged(IDS), other_rows)
    with pytest.raises(tf.errors.InvalidArgumentError, match="row_splits"):
        layer_of(mask_zero=True)(ragged(IDS), other_rows)
    with pytest.raises(TypeError, match="weights must have a float"):
        layer(tf.constant([1]), tf.constant([True]))


def test_ids_of_rank_3_raise() -> None:
    with pytest.raises(ValueError, match="rank 1 or 2"):
        layer_of()(tf.zeros([2, 2, 2], tf.int32))
    with pytest.raises(ValueError, match="rank 1 or 2"):
        layer_of()(keras.Input([2, 2], dtype="int32"))


@pytest.mark.parametrize("combiner", ["max", None])
def test_an_unknown_combiner_raises(combiner: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="combiner must be one"):
        tde.EmbedReduce(5, 4, combiner=combiner)


def test_quantization_raises() -> None:
    with pytest.raises(ValueError, match="cannot be quantized"):
        tde.EmbedReduce(5, 4, dtype="int8_from_float32")
    layer = layer_of()
    with pytest.raises(NotImplementedError):
        layer.quantize("int8")
