"""Weighted sums of rows, for few and many columns."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_distembed import sparse_product

READ = [0, 2, 2, 1, 0]
WRITE = [3, 0, 3, 3, 0]
GAINS = [1.0, -0.5, 2.0, 0.0, 0.25]


@pytest.mark.parametrize("columns", [1, 16, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_equal_those_of_a_loop(columns: int, dtype: type) -> None:
    values = np.random.default_rng(0).normal(size=(3, columns)).astype(dtype)
    expected = np.zeros((5, columns), dtype)
    for read, write, gain in zip(READ, WRITE, GAINS, strict=True):
        expected[write] += dtype(gain) * values[read]
    found = sparse_product.weighted_sums(
        tf.constant(values),
        tf.constant(READ),
        tf.constant(WRITE),
        tf.constant(GAINS, dtype),
        5,
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("columns", [4, 40])
@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_to_sum_is_zero(columns: int, rows: int) -> None:
    none = tf.zeros([0], tf.int32)

    @tf.function
    def sums(num_rows: tf.Tensor) -> tf.Tensor:
        # What the memory of the result held before must not be seen.
        junk = tf.random.normal([7, columns])
        with tf.control_dependencies([tf.reduce_sum(junk)]):
            return sparse_product.weighted_sums(
                tf.ones([rows, columns]), none, none, tf.zeros([0]), num_rows
            )

    for _ in range(5):
        np.testing.assert_array_equal(
            sums(tf.constant(7)), np.zeros([7, columns])
        )


def test_only_dtypes_that_the_product_has_are_multiplied() -> None:
    assert not sparse_product.is_fast(tf.float16)
    assert not sparse_product.is_fast(tf.bfloat16)
