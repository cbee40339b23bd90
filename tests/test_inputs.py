"""What may be fed: every check of ids and weights, through the layer.

Row `r` of the table is `[r + 1, 10 (r + 1)]`, so that a wrong row is seen at
once. A refused input changes nothing.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde

VOCABULARY = 10
ROWS = np.outer(np.arange(1, VOCABULARY + 1), [1.0, 10.0])
Invalid = tf.errors.InvalidArgumentError


def make_layer(combiner: str = "sum", **arguments: Any) -> Any:
    feature = {
        key: arguments.pop(key)
        for key in ("input_shape", "output_shape")
        if key in arguments
    }
    table = tde.TableConfig(
        "item", VOCABULARY, 2, initializer=ROWS, combiner=combiner
    )
    return tde.DistributedEmbedding(
        tde.FeatureConfig("watched", table, **feature), **arguments
    )


@pytest.fixture(scope="module")
def layer() -> Any:
    return make_layer()


def ragged(rows: Sequence[Sequence[float]], dtype: str = "int64") -> Any:
    return tf.RaggedTensor.from_row_lengths(
        tf.constant([x for row in rows for x in row], dtype),
        [len(row) for row in rows],
    )


def sparse(
    cells: Sequence[tuple[int, int, float]],
    shape: Sequence[int],
    dtype: str = "int64",
) -> Any:
    indices = np.array([cell[:2] for cell in cells], np.int64).reshape(-1, 2)
    values = tf.constant([cell[2] for cell in cells], dtype)
    return tf.SparseTensor(indices, values, shape)


def sums(*bags: Sequence[int]) -> np.ndarray:
    return np.array([sum((ROWS[i] for i in bag), np.zeros(2)) for bag in bags])


def assert_refused(
    call: Callable[[], Any], error: type[Exception], *parts: str
) -> None:
    with pytest.raises(error) as caught:
        call()
    text = message(caught)
    for part in ["Feature 'watched'", *parts]:
        assert part in text, text


def message(caught: pytest.ExceptionInfo) -> str:
    """Without the backslashes that a graph's assertion puts before quotes."""
    return str(caught.value).replace("\\'", "'")


# -- The dtype of ids ---------------------------

WRONG_DTYPES = [
    (tf.constant([True, False]), ["bool", "Cast the ids to int32 or int64"]),
    (tf.constant([1.0, 2.0]), ["float32", "keras.Input(..., dtype='int64')"]),
    (np.array([1.0, 2.0]), ["float64", "Sequential", "cast the ids"]),
    (tf.constant([1.0], tf.bfloat16), ["bfloat16", "keras.Input"]),
    (tf.constant(["a"]), ["string", "StringLookup"]),
    (np.array(["a", "b"]), ["string", "StringLookup"]),
    (["a", "b"], ["string", "StringLookup"]),
    ([[1.5], [2.0, 3.0]], ["float64", "cast the ids"]),
    (tf.constant([1j]), ["complex128", "Cast the ids"]),
    (ragged([[1.0]], "float32"), ["float32", "keras.Input"]),
    (sparse([(0, 0, 1.0)], [1, 1], "float32"), ["float32", "keras.Input"]),
]


@pytest.mark.parametrize(
    "ids, parts", WRONG_DTYPES, ids=[str(parts[0]) for _, parts in WRONG_DTYPES]
)
def test_ids_of_another_dtype_are_refused_with_the_cure(layer, ids, parts):
    expected = "ids must have an integer dtype"
    assert_refused(lambda: layer(ids), TypeError, expected, *parts)
    assert_refused(lambda: layer.preprocess(ids), TypeError, expected, *parts)


def test_float_ids_of_keras_are_refused_with_the_cure():
    parts = ["dtype=float32", "keras.Input(..., dtype='int64')", "Sequential"]
    ids = np.array([[1], [2]])

    def sequential() -> keras.Model:
        model = keras.Sequential([make_layer(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    assert_refused(lambda: sequential()(ids), TypeError, *parts)
    assert_refused(
        lambda: sequential().fit(ids, np.ones([2, 1]), verbose=0),
        TypeError,
        *parts,
    )
    symbolic = keras.Input((1,))
    assert_refused(lambda: make_layer()(symbolic), TypeError, *parts)


def test_integer_ids_of_a_sequential_model_with_the_right_input():
    model = keras.Sequential(
        [keras.Input((2,), dtype="int64"), make_layer(), keras.layers.Dense(1)]
    )
    assert model(np.array([[1, 2], [3, 4], [5, 5]])).shape == (3, 1)


@pytest.mark.parametrize(
    "dtype",
    ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"],
)
def test_every_integer_dtype_reads_the_right_rows(layer, dtype):
    ids = [9, 0, 5]
    np.testing.assert_array_equal(layer(tf.constant(ids, dtype)), ROWS[ids])
    np.testing.assert_array_equal(layer(np.array(ids, dtype)), ROWS[ids])


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_narrow_ids_with_a_vocabulary_beyond_their_range(dtype):
    table = tde.TableConfig(
        "big", 70_000, 1, initializer=np.arange(70_000.0)[:, None]
    )
    layer = tde.DistributedEmbedding(tde.FeatureConfig("watched", table))
    ids = [0, 127] if dtype == "int8" else [0, 255]
    np.testing.assert_array_equal(
        layer(tf.constant(ids, dtype))[:, 0], np.array(ids, "float32")
    )


# -- The range of ids ---------------------------

OUTSIDE = [
    (10, "int32"),
    (-1, "int64"),
    (-1, "int8"),
    (200, "uint8"),
    (2**32 + 1, "int64"),
    (2**32 - 1, "uint32"),
    (2**32 + 1, "uint64"),
    (2**64 - 1, "uint64"),
    (-(2**63), "int64"),
]


@pytest.mark.parametrize("bad, dtype", OUTSIDE)
def test_an_id_outside_the_table_is_refused(layer, bad, dtype):
    ids = tf.constant([1, bad, 2, bad], dtype)
    assert_refused(
        lambda: layer(ids),
        Invalid,
        "table 'item'",
        "vocabulary_size=10",
        "from 0 to 9",
        f"id {bad} (2 such ids",
        "invalid_ids='drop'",
    )


@pytest.mark.parametrize("bad, dtype", OUTSIDE)
def test_an_id_outside_the_table_is_dropped_and_never_another_row(bad, dtype):
    layer = make_layer("mean", invalid_ids="drop")
    ids = tf.constant([[1, bad], [bad, bad]], dtype)
    np.testing.assert_array_equal(layer(ids), [ROWS[1], [0, 0]])
    assert layer.id_statistics() == {"dropped": {"watched": 3}}


def test_one_error_names_every_feature_that_is_wrong():
    table = tde.TableConfig("item", 10, 2)
    layer = tde.DistributedEmbedding(
        {
            name: tde.FeatureConfig(f"f_{name}", table)
            for name in ("a", "b", "c")
        },
        invalid_ids={"f_c": "drop"},
    )
    traced = tf.function(lambda x: layer(x))
    bad = {"a": [11, 1], "b": [1, -7], "c": [99, 1]}
    bad = {name: tf.constant(ids) for name, ids in bad.items()}
    for call in (layer, traced):
        with pytest.raises(Invalid) as caught:
            call(bad)
        text = message(caught)
        assert "Feature 'f_a': table 'item'" in text
        assert "id 11 (1 such" in text
        assert "Feature 'f_b': table 'item'" in text
        assert "id -7 (1 such" in text
        assert "f_c" not in text.split("Arguments received")[0]


def test_a_refused_batch_changes_nothing():
    layer = make_layer()
    optimizer = keras.optimizers.SGD()

    @tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.int64)])
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids, training=True) ** 2)
        variables = layer.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    def state() -> dict[str, Any]:
        return {
            "values": layer.get_embedding_tables()["item"].numpy(),
            **layer.get_optimizer_state()["item"],
        }

    step(ragged([[1, 2], [3]]))
    before = state()
    assert before["step"] == 1
    assert_refused(lambda: step(ragged([[1, 2], [10]])), Invalid, "id 10")
    for name, value in state().items():
        np.testing.assert_array_equal(value, before[name])
    step(ragged([[1]]))
    assert state()["step"] == 2


# -- Rank, kind and declared shape --------------


def test_wrong_ranks_are_refused(layer):
    expected = "ids must have rank 1 or 2"
    for ids, received in [
        (tf.constant(3), "dense ids of shape ()"),
        (tf.zeros([2, 2, 2], tf.int32), "dense ids of shape (2, 2, 2)"),
        (
            tf.ragged.constant([[[1], [2]], [[3]]]),
            "ragged ids of shape (2, None, None)",
        ),
        (
            tf.ragged.constant([[[1, 2]], [[3, 4]]], ragged_rank=1),
            "ragged ids of shape (2, None, 2)",
        ),
        (
            tf.sparse.from_dense(tf.ones([2, 2, 2], tf.int32)),
            "sparse ids of shape (2, 2, 2)",
        ),
    ]:
        assert_refused(lambda x=ids: layer(x), ValueError, expected, received)
    assert_refused(
        lambda: layer(keras.Input((2, 2), dtype="int64")),
        ValueError,
        expected,
        "dense ids of shape (None, 2, 2)",
    )


def test_an_unknown_rank_is_refused_with_the_cure(layer):
    unknown = tf.TensorSpec(None, tf.int64)
    known = tf.TensorSpec([None], tf.int64)
    weights = tf.TensorSpec(None, tf.float32)
    call = tf.function(lambda x: layer(x))
    assert_refused(
        lambda: call.get_concrete_function(unknown),
        ValueError,
        "ids must have a rank that is known",
        "shape=<unknown>",
        "tf.ensure_shape",
    )
    call = tf.function(lambda x, w: layer(x, w))
    assert_refused(
        lambda: call.get_concrete_function(known, weights),
        ValueError,
        "weights must have a rank that is known",
        "input_signature",
    )


@pytest.mark.parametrize(
    "declared, ids, parts",
    [
        ((None, 3), [[1, 2]], ["(None, 3)", "declares 3 ids", "(1, 2)"]),
        (
            (8, 3),
            [1, 2],
            ["(8, 3)", "declares 3 ids", "dense ids of shape (2,"],
        ),
        ((8,), [[1, 2]], ["(8,)", "one id an example", "(1, 2)", "Declare"]),
        ((8,), ragged([[1]]), ["(8,)", "one id", "ragged ids of shape"]),
        ((8,), sparse([(0, 0, 1)], [1, 1]), ["(8,)", "sparse ids of shape"]),
    ],
)
def test_ids_that_contradict_the_declared_shape_are_refused(
    declared, ids, parts
):
    layer = make_layer(input_shape=declared)
    assert_refused(lambda: layer(ids), ValueError, "input_shape=", *parts)


def test_a_declared_shape_that_fits_is_accepted():
    assert make_layer(input_shape=(8,))([1, 2]).shape == (2, 2)
    assert make_layer(input_shape=(8,))([[1], [2]]).shape == (2, 2)
    assert make_layer(input_shape=(8, 1))([1, 2]).shape == (2, 2)
    assert make_layer(input_shape=(8, None))([[1, 2]]).shape == (1, 2)
    assert make_layer(input_shape=(None, 2))([[1, 2]] * 9).shape == (9, 2)


def test_a_width_unknown_until_run_time_is_checked_then():
    layer = make_layer(input_shape=(None, 2))
    call = tf.function(lambda x: layer(x)).get_concrete_function(
        tf.TensorSpec([None, None], tf.int64)
    )
    ids = tf.constant([[1, 2]], tf.int64)
    np.testing.assert_array_equal(call(ids), sums([1, 2]))
    assert_refused(
        lambda: call(tf.constant([[1, 2, 3]], tf.int64)),
        Invalid,
        "input_shape=(None, 2)",
        "declares 2 ids",
        "3 ids an example",
    )


NO_IDS = [
    (None, ["must be a tensor", "None (of type NoneType)"]),
    ({"a": [1]}, ["must be a tensor", "(of type dict)"]),
    ("abc", ["must be a tensor", "'abc' (of type str)"]),
    (3, ["list of integers", "3"]),
    ([1, [2]], ["list of lists of integers", "[1, [2]]"]),
    ([[1, [2]], [3]], ["list of lists of integers"]),
    ([None, 1], ["list of integers", "[None, 1]"]),
    ([2**64], ["list of integers", str(2**64)]),
    ([[2**70], [1, 2]], ["list of integers", str(2**70)]),
]


@pytest.mark.parametrize("ids, parts", NO_IDS, ids=lambda v: str(v)[:20])
def test_what_is_no_ids_is_refused(layer, ids, parts):
    assert_refused(lambda: layer(ids), TypeError, "ids must be", *parts)


# -- Kinds --------------------------------------

BAGS = [[3, 1, 3], [], [7]]


@pytest.mark.parametrize(
    "ids",
    [
        BAGS,
        np.array([np.array(bag, np.int64) for bag in BAGS], object),
        np.array(BAGS, object),
        ragged(BAGS),
        tf.RaggedTensor.from_row_splits([3, 1, 3, 7], np.array([0, 3, 3, 4])),
        sparse([(0, 0, 3), (0, 1, 1), (0, 2, 3), (2, 0, 7)], [3, 3]),
        # Unsorted, and several ids in one cell.
        sparse([(2, 5, 7), (0, 4, 1), (0, 0, 3), (0, 4, 3)], [3, 6]),
    ],
    ids=["list", "arrays", "lists", "ragged", "int32", "sparse", "unsorted"],
)
def test_one_batch_in_every_kind(layer, ids):
    np.testing.assert_array_equal(layer(ids), sums(*BAGS))
    np.testing.assert_array_equal(layer(layer.preprocess(ids)), sums(*BAGS))


def test_dense_ids_of_rank_1_are_those_of_width_1(layer):
    np.testing.assert_array_equal(layer([4, 2]), ROWS[[4, 2]])
    np.testing.assert_array_equal(layer([[4], [2]]), ROWS[[4, 2]])


def test_sparse_weights_follow_unsorted_ids():
    cells = [(2, 5, 7), (0, 4, 1), (0, 0, 3), (0, 4, 2)]
    factors = [0.5, 2.0, 3.0, 4.0]
    layer = make_layer(input_shape=(None, 2))
    ids = sparse(cells, [3, 6])
    weights = ids.with_values(tf.constant(factors))
    # In order: row 0 is 3 * 3.0, 1 * 2.0, then 2 * 4.0, which is cut.
    expected = [3 * ROWS[3] + 2 * ROWS[1], [0, 0], 0.5 * ROWS[7]]
    np.testing.assert_array_equal(layer(ids, weights), expected)
    traced = tf.function(lambda x, w: layer(x, w))
    np.testing.assert_array_equal(traced(ids, weights), expected)


@pytest.mark.parametrize("row", [5, -1])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"input_shape": (None, 2)}, {"output_shape": (None, 2, 2)}],
    ids=["plain", "cut", "unreduced"],
)
def test_a_sparse_row_outside_dense_shape_is_refused(row, arguments):
    layer = make_layer(**arguments)
    ids = sparse([(row, 0, 1)], [2, 3])
    call = tf.function(lambda x: layer(x))
    parts = [f"rows from {row} to {row}", "dense_shape[0]=2"]
    assert_refused(lambda: layer(ids), Invalid, *parts)
    assert_refused(lambda: call(ids), Invalid, *parts)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"input_shape": (None, 3)}, {"output_shape": (None, 2, 2)}],
    ids=["plain", "cut", "unreduced"],
)
def test_time_and_memory_do_not_follow_dense_shape(arguments):
    layer = make_layer(**arguments)
    ids = sparse([(1, 2**39, 4), (1, 7, 2)], [3, 2**40])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tf.GradientTape() as tape:
        output = layer(ids, training=True)
        loss = tf.reduce_sum(output)
    gradient = tape.gradient(loss, layer.trainable_variables)[0]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # A single byte a column would be 2**40.
    assert (after - before) * 1024 < 2**30
    if "output_shape" in arguments:
        expected = [np.zeros([2, 2]), ROWS[[2, 4]], np.zeros([2, 2])]
    else:
        expected = sums([], [2, 4], [])
    np.testing.assert_array_equal(output, expected)
    assert sorted(gradient.indices.numpy()) == [2, 4]


# -- Weights ------------------------------------


WRONG_WEIGHTS = [
    (ragged([[1]]), tf.constant([[1.0]]), ["ragged ids", "dense weights"]),
    (
        tf.constant([[1]]),
        ragged([[1.0]], "float32"),
        ["dense ids of shape (1, 1)", "ragged weights"],
    ),
    (
        sparse([(0, 0, 1)], [1, 1]),
        tf.constant([[1.0]]),
        ["sparse ids", "dense weights of shape (1, 1)"],
    ),
    (
        tf.constant([[1, 2], [3, 4]]),
        tf.constant([1.0, 2.0]),
        ["ids of shape (2, 2)", "weights of shape (2,)"],
    ),
    (
        tf.constant([1, 2]),
        tf.constant([[1.0, 1.0], [2.0, 2.0]]),
        ["ids of shape (2,)", "weights of shape (2, 2)"],
    ),
    (
        tf.constant([1, 2]),
        tf.constant([1.0]),
        ["ids of shape (2,)", "weights of shape (1,)"],
    ),
    (
        tf.constant([1, 2]),
        tf.ones([2, 1, 1]),
        ["ids of shape (2,)", "weights of shape (2, 1, 1)"],
    ),
    (
        tf.constant([1, 2]),
        tf.constant(1.0),
        ["ids of shape (2,)", "weights of shape ()"],
    ),
    (
        ragged([[1, 2], [3]]),
        tf.ragged.constant([[[1.0], [2.0]], [[3.0]]]),
        ["ids of shape (2, None)", "weights of shape (2, None, None)"],
    ),
    (
        ragged([[1, 2], [3]]),
        tf.RaggedTensor.from_row_splits(tf.ones([3, 2]), [0, 2, 3]),
        ["ids of shape (2, None)", "weights of shape (2, None, 2)"],
    ),
    (
        ragged([[1, 2]]),
        ragged([[1], [2]], "float32"),
        ["ids of shape (1, None)", "weights of shape (2, None)"],
    ),
    (
        sparse([(0, 0, 1)], [1, 1]),
        sparse([(0, 0, 1)], [1, 2], "float32"),
        ["ids of shape (1, 1)", "weights of shape (1, 2)"],
    ),
]


@pytest.mark.parametrize("ids, weights, parts", WRONG_WEIGHTS)
def test_weights_that_do_not_lie_beside_the_ids(layer, ids, weights, parts):
    for call in (layer, layer.preprocess):
        assert_refused(
            lambda call=call: call(ids, weights),
            ValueError,
            "one weight an id",
            *parts,
        )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"invalid_ids": "drop"},
        {"input_shape": (None, 1)},
        {"output_shape": (None, 2, 2)},
    ],
    ids=["plain", "drop", "cut", "unreduced"],
)
def test_weights_with_other_row_lengths_or_indices(arguments):
    layer = make_layer(**arguments)
    ids = ragged([[1, 2], [3]])
    cells = sparse([(0, 1, 1), (0, 0, 2)], [2, 3])
    wrong = [
        (ids, ragged([[1], [2]], "float32"), ["row_splits", "[0 2 3]"]),
        (ids, ragged([[1], [2, 3]], "float32"), ["row_splits", "[0 1 3]"]),
        (cells, sparse([(0, 1, 1)], [2, 3], "float32"), ["indices"]),
        (
            cells,
            sparse([(0, 1, 1), (0, 2, 2)], [2, 3], "float32"),
            ["indices"],
        ),
    ]
    traced = tf.function(lambda x, w: layer(x, w))
    for call in (layer, traced):
        for one, weights, parts in wrong:
            assert_refused(
                lambda call=call, x=one, w=weights: call(x, w),
                Invalid,
                "weights must have the same",
                *parts,
            )


def test_dense_weights_of_a_shape_seen_only_at_run_time(layer):
    call = tf.function(lambda x, w: layer(x, w)).get_concrete_function(
        tf.TensorSpec([None, None], tf.int64),
        tf.TensorSpec([None, None], tf.float32),
    )
    ids = tf.constant([[1, 2]], tf.int64)
    weights = tf.constant([[2.0, 0.5]])
    np.testing.assert_array_equal(call(ids, weights), [[2 * 2 + 1.5, 55.0]])
    for bad in (tf.ones([1, 1]), tf.ones([2, 1]), tf.ones([2, 2])):
        assert_refused(
            lambda w=bad: call(ids, w), Invalid, "same shape as", "[1 2]"
        )


@pytest.mark.parametrize(
    "weights, received",
    [
        (tf.constant([True]), "bool"),
        (tf.constant(["a"]), "string"),
        (tf.constant([1j]), "complex128"),
    ],
)
def test_weights_of_another_dtype_are_refused(layer, weights, received):
    assert_refused(
        lambda: layer([1], weights),
        TypeError,
        "weights must have a float or integer dtype",
        f"dtype={received}",
    )


def test_what_is_no_weights_is_refused(layer):
    assert_refused(
        lambda: layer([1], {"a": 1}), TypeError, "weights must be", "dict"
    )
    assert_refused(
        lambda: layer([[1], [2, 3]], [[1.0], [2.0, "x"]]), TypeError, "weights"
    )


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint16"])
def test_weights_are_cast_to_float32(layer, dtype):
    output = layer([[1, 2]], tf.constant([[2, 3]], dtype))
    np.testing.assert_array_equal(output, [2 * ROWS[1] + 3 * ROWS[2]])


def test_weights_of_rank_1_and_width_1_are_the_same(layer):
    for ids in ([4, 2], [[4], [2]]):
        for weights in ([2.0, 3.0], [[2.0], [3.0]]):
            np.testing.assert_array_equal(
                layer(ids, weights), [2 * ROWS[4], 3 * ROWS[2]]
            )


def test_lists_arrays_and_tensors_may_be_mixed():
    table = tde.TableConfig(
        "item", VOCABULARY, 2, initializer=ROWS, combiner="sum"
    )
    layer = tde.DistributedEmbedding(
        [tde.FeatureConfig(f"f{i}", table) for i in range(4)]
    )
    outputs = layer(
        [[[1, 2]], np.array([3]), tf.constant([4]), ragged([[5, 6]])],
        [None, np.array([2.0]), [3], ragged([[0, 1]], "float32")],
    )
    expected = [sums([1, 2]), 2 * ROWS[[3]], 3 * ROWS[[4]], ROWS[[6]]]
    for output, value in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(output, value)


# -- Empty --------------------------------------


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize(
    "ids, rows",
    [
        (ragged([[], [1], []]), 3),
        (ragged([[], []]), 2),
        (ragged([]), 0),
        (sparse([(1, 0, 1)], [3, 1]), 3),
        (sparse([], [2, 4]), 2),
        (sparse([], [0, 4]), 0),
        (tf.zeros([0], tf.int64), 0),
        (tf.zeros([0, 3], tf.int64), 0),
        (tf.zeros([2, 0], tf.int64), 2),
        ([], 0),
        ([[], []], 2),
    ],
)
def test_empty_rows_and_batches(combiner, ids, rows):
    layer = make_layer(combiner)
    with tf.GradientTape() as tape:
        output = layer(ids, training=True)
        loss = tf.reduce_sum(output)
    expected = np.zeros([rows, 2])
    if rows == 3:
        expected[1] = ROWS[1]
    np.testing.assert_array_equal(output, expected)
    gradient = tape.gradient(loss, layer.trainable_variables)[0]
    assert list(gradient.indices) == ([1] if rows == 3 else [])


def test_an_empty_unreduced_batch():
    layer = make_layer(output_shape=(None, 3, 2))
    assert layer(ragged([])).shape == (0, 3, 2)
    np.testing.assert_array_equal(layer([[], []]), np.zeros([2, 3, 2]))


# -- Cut, unreduced, dropped --------------------


def test_rows_are_cut_with_their_weights_before_any_denominator():
    ids = ragged([[1, 2, 3], [4]])
    weights = ragged([[1.0, 3.0, 100.0], [2.0]], "float32")
    expected = {
        "sum": [ROWS[1] + 3 * ROWS[2], 2 * ROWS[4]],
        "mean": [(ROWS[1] + 3 * ROWS[2]) / 4, ROWS[4]],
        "sqrtn": [(ROWS[1] + 3 * ROWS[2]) / np.sqrt(10), ROWS[4]],
    }
    for combiner, value in expected.items():
        layer = make_layer(combiner, input_shape=(None, 2))
        np.testing.assert_allclose(layer(ids, weights), value, rtol=1e-6)
        cells = sparse([(0, 0, 1), (0, 5, 2), (0, 7, 3), (1, 9, 4)], [2, 10])
        np.testing.assert_allclose(
            layer(cells, cells.with_values(weights.values)), value, rtol=1e-6
        )


def test_ids_are_dropped_before_rows_are_cut():
    layer = make_layer(input_shape=(None, 2), invalid_ids="drop")
    np.testing.assert_array_equal(
        layer(ragged([[99, 1, 2, 3], [-1]])), sums([1, 2], [])
    )
    assert layer.id_statistics()["dropped"] == {"watched": 2}


def test_unreduced_ids_fill_positions_in_order():
    layer = make_layer(output_shape=(None, 2, 2))
    expected = np.zeros([3, 2, 2])
    expected[0] = ROWS[[5, 6]]
    expected[2, 0] = ROWS[8]
    for ids in (
        ragged([[5, 6, 7], [], [8]]),
        sparse([(0, 1, 5), (0, 3, 6), (0, 4, 7), (2, 9, 8)], [3, 10]),
    ):
        np.testing.assert_array_equal(layer(ids), expected)
    np.testing.assert_array_equal(
        layer([[5, 6, 7], [1, 2, 3]]), [ROWS[[5, 6]], ROWS[[1, 2]]]
    )
    # A dense row that is shorter is filled up.
    np.testing.assert_array_equal(layer([[5]]), [[ROWS[5], [0, 0]]])


def test_the_number_of_positions_may_be_the_batches_own():
    layer = make_layer(output_shape=(None, None, 2))
    assert layer([[5, 6, 7]]).shape == (1, 3, 2)
    assert layer(ragged([[5], [6, 7]])).shape == (2, 2, 2)
    declared = make_layer(input_shape=(None, 4), output_shape=(None, None, 2))
    assert declared(ragged([[5], [6, 7]])).shape == (2, 4, 2)


# -- Counts of dropped ids ----------------------


def test_dropped_ids_are_counted_by_feature_until_reset():
    item = tde.TableConfig("item", 10, 2)
    layer = tde.DistributedEmbedding(
        [tde.FeatureConfig(name, item) for name in ("a", "b", "c")],
        invalid_ids={"a": "drop", "c": "drop"},
    )
    none = {"a": 0, "b": 0, "c": 0}
    assert layer.id_statistics() == {"dropped": none}
    call = tf.function(lambda x: layer(x))
    call([tf.constant([1, 99]), tf.constant([1]), tf.constant([-1, -2])])
    call([tf.constant([1, 99]), tf.constant([1]), tf.constant([1, -2])])
    layer([[99], [1], [[1, 2]]])
    assert layer.id_statistics()["dropped"] == {"a": 3, "b": 0, "c": 3}
    counts = layer.id_statistics(reset=True)
    assert counts == {"dropped": {"a": 3, "b": 0, "c": 3}}
    assert layer.id_statistics() == {"dropped": none}
    with pytest.raises(Invalid, match="Feature 'b'"):
        layer([[1], [10], [1]])


def test_dropped_ids_are_no_weights_and_in_no_config():
    layer = make_layer(invalid_ids="drop")
    layer([99])
    assert len(layer.weights) == 1
    again = tde.DistributedEmbedding.from_config(layer.get_config())
    assert again.id_statistics()["dropped"] == {"watched": 0}
    np.testing.assert_array_equal(again([99, 1]), [[0, 0], ROWS[1]])
