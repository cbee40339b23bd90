"""What a TPU could not compile is refused when a replica is traced."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import tensorflow as tf

import tf_distembed as tde

on_host = tf.compat.v1.tpu.outside_compilation


@pytest.fixture(scope="module")
def strategy() -> Iterator[tf.distribute.TPUStrategy]:
    with tde.testing.sparsecore_emulator() as strategy:
        yield strategy


def refusal(strategy, fn: Callable, *args) -> str:
    """The message with which `fn` is refused."""
    function = tf.function(lambda: strategy.run(fn, args=args))
    with pytest.raises(ValueError, match="a TPU cannot do what") as caught:
        function()
    return str(caught.value)


def through_a_branch(fn: Callable) -> Callable:
    return lambda x: tf.cond(x[0] > 0, lambda: fn(x), lambda: x)


def through_a_loop(fn: Callable) -> Callable:
    return lambda x: tf.while_loop(
        lambda i, y: i < 2, lambda i, y: (i + 1, fn(y)), (0, x)
    )[1]


def through_a_function(fn: Callable) -> Callable:
    return lambda x: tf.function(fn)(x)


def as_text(x):
    return tf.strings.to_number(tf.strings.as_string(x))


@pytest.mark.parametrize(
    "through",
    [lambda fn: fn, through_a_branch, through_a_loop, through_a_function],
    ids=["here", "branch", "loop", "function"],
)
def test_operation_without_an_xla_kernel(strategy, through) -> None:
    message = refusal(strategy, through(as_text), tf.ones([2]))
    assert re.search(
        r"AsString '.*AsString' \(.*test_emulator_refusals.py:\d+\): XLA has "
        "no kernel for it with dtypes float32, string.",
        message,
    )
    assert "StringToNumber" in message
    assert "tf.compat.v1.tpu.outside_compilation" in message


@pytest.mark.parametrize(
    "fn, expected",
    [
        (lambda x: [tf.print(x), x][1:], "PrintV2"),
        (
            lambda x: tf.numpy_function(lambda a: a, [x], tf.float32),
            "PyFunc",
        ),
        (lambda x: tf.cast(x, tf.complex128), "complex128"),
        (
            lambda x: tf.sparse.sparse_dense_matmul(
                tf.sparse.from_dense(tf.eye(2)), x[:, tf.newaxis]
            ),
            "SparseTensorDenseMatMul",
        ),
        (
            lambda x: tf.ragged.stack([x, x[:1]]).to_tensor(),
            "RaggedTensorToTensor",
        ),
    ],
    ids=["print", "python", "complex128", "sparse", "ragged"],
)
def test_operations_of_many_kinds(strategy, fn, expected: str) -> None:
    assert expected in refusal(strategy, fn, tf.ones([2]))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: tf.reduce_sum(tf.where(x > 1)),
        lambda x: tf.reduce_sum(tf.unique(x)[0]),
        lambda x: tf.reduce_sum(tf.boolean_mask(x, x > 1)),
        lambda x: tf.range(x[0]),
    ],
    ids=["where", "unique", "mask", "range"],
)
def test_size_that_depends_on_values(strategy, fn) -> None:
    message = refusal(strategy, fn, tf.ones([2]))
    assert "all sizes must be known when it is compiled" in message


def test_slice_up_to_a_length_that_only_the_run_knows(strategy) -> None:
    """XLA bounds it by what is sliced; here the length is a host block's."""

    def fn(x, rows):
        length = on_host(lambda: tf.ensure_shape(tf.size(rows), []))
        return x[:length] * 2

    spec = [tf.TensorSpec([4], tf.float32), tf.RaggedTensorSpec([None, None])]

    @tf.function(input_signature=spec)
    def step(x, rows):
        return strategy.run(fn, args=(x, rows))

    got = step(tf.range(4.0), tf.ragged.constant([[1.0], [2.0, 3.0]]))
    assert got.numpy().tolist() == [0, 2, 4]


def test_size_that_depends_on_values_beside_an_unknown_batch(
    strategy,
) -> None:
    """The batch may be of unknown size; what is made of its values, not."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def step(x):
        return strategy.run(lambda x: tf.unique(x)[0], args=(x,))

    with pytest.raises(ValueError, match="Unique"):
        step(tf.ones([2]))


def test_unknown_batch_where_the_options_forbid_it(strategy) -> None:
    options = tf.distribute.RunOptions(
        experimental_enable_dynamic_batch_size=False
    )

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def step(x):
        return strategy.run(lambda x: x * 2, args=(x,), options=options)

    with pytest.raises(ValueError, match=r"shape \(None,\)"):
        step(tf.ones([2]))


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_part_of_a_composite_input_outside_of_a_host_block(
    strategy, kind: str
) -> None:
    spec = {
        "ragged": tf.RaggedTensorSpec([2, None], tf.int32),
        "sparse": tf.SparseTensorSpec([2, None], tf.int32),
    }[kind]
    given = tf.ragged.constant([[1, 2], [3]])
    given = given if kind == "ragged" else given.to_sparse()

    @tf.function(input_signature=[spec])
    def step(x):
        return strategy.run(lambda x: x.values + 1, args=(x,))

    with pytest.raises(
        ValueError, match=r"part of a ragged or sparse input, of shape \(None,"
    ):
        step(given)


def test_unknown_size_from_a_host_block(strategy) -> None:
    message = refusal(
        strategy,
        lambda x: on_host(lambda: tf.boolean_mask(x, x > 1)) + 1,
        tf.ones([2]),
    )
    assert "takes a tensor of shape (None,) from a host block" in message


def test_string_from_a_host_block(strategy) -> None:
    message = refusal(
        strategy, lambda x: on_host(tf.strings.as_string, x), tf.ones([2])
    )
    assert "What the replica returns: XLA has no kernel" in message


def test_unknown_size_to_a_host_block(strategy) -> None:
    """The input itself may go there, whatever its size; not what is made of
    it on the TPU.
    """

    def total(x):
        return tf.ensure_shape(on_host(tf.reduce_sum, x), [])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def step(x):
        return strategy.run(lambda x: total(x), args=(x,))

    assert float(step(tf.ones([3]))) == 3

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def bad(x):
        return strategy.run(lambda x: total(x * 2), args=(x,))

    with pytest.raises(ValueError, match="a host block gets a tensor that"):
        bad(tf.ones([3]))


def test_variable_made_outside_of_the_strategy(strategy) -> None:
    outside = tf.Variable(1.0, name="outside")
    message = refusal(strategy, lambda: outside + 1)
    assert "Variable 'outside' was not made under the strategy" in message
    assert "with strategy.scope():" in message
    # A host block may read it: it lives there.
    function = tf.function(
        lambda: strategy.run(lambda: on_host(lambda: outside + 1.0))
    )
    assert float(function()) == 2


def test_variable_of_the_strategy_in_a_host_block(strategy) -> None:
    with strategy.scope():
        inside = tf.Variable(1.0, name="inside")
    message = refusal(strategy, lambda: on_host(lambda: inside + 1.0))
    assert "a variable of the strategy ('inside:0'), which lives" in message


def test_lookup_table(strategy) -> None:
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([1], [2]), 0
    )
    message = refusal(strategy, lambda: table.lookup(tf.constant([1])))
    assert "LookupTableFindV2" in message


def test_all_problems_are_named_at_once(strategy) -> None:
    def fn(x):
        for _ in range(12):
            x = as_text(x)
        return x

    message = refusal(strategy, fn, tf.ones([2]))
    assert len(re.findall(r"^ +\* AsString", message, re.MULTILINE)) == 5
    assert "  * and 14 more" in message


def test_what_is_not_used_is_not_compiled(strategy) -> None:
    def fn(x):
        tf.strings.as_string(x)
        return x

    function = tf.function(lambda: strategy.run(fn, args=(tf.ones([2]),)))
    assert function().numpy().tolist() == [1, 1]
