"""The host operations in NumPy equal TensorFlow's own kernels.

Only the `tensorflow-tpu` wheel has the kernels, so this file is not among the
tests that run everywhere: `scripts/tpu_kernels.sh` runs it, in an environment
of its own. TensorFlow must not look for a TPU, or it waits for one:

    TPU_LOAD_LIBRARY=0 pytest tests/testing/sparsecore_kernels_check.py

Integers, sizes and messages are equal, and gains to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tf_distembed.testing import csr_buffers, host_kernels, host_ops
from tf_distembed.testing.private_tensorflow import gen_xla_ops

KINDS = ("dense", "ragged", "sparse")


def test_this_tensorflow_has_the_kernels() -> None:
    assert host_kernels.wheel_has_host_kernels(), (
        "Run this with tensorflow-tpu==2.20.0 and TPU_LOAD_LIBRARY=0."
    )


def batch(
    kind: str, rng: np.random.Generator, samples: int, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Splits or indices, ids and weights: with duplicates, zeros, negatives."""
    lengths = rng.integers(0, 5, samples)
    if kind == "dense":
        splits, count = np.zeros(0), samples
    elif kind == "ragged":
        splits, count = np.concatenate([[0], np.cumsum(lengths)]), None
    else:
        splits = np.stack(
            [np.repeat(np.arange(samples), lengths), np.arange(lengths.sum())],
            axis=1,
        )
        count = None
    count = lengths.sum() if count is None else count
    ids = rng.integers(0, size, count)
    # Few enough that an id comes twice in a sample, in a row or apart.
    ids[::3] = rng.integers(0, 3, len(ids[::3]))
    weights = rng.normal(size=count)
    weights[::5] = 0
    return (
        splits.astype(np.int32),
        ids.astype(np.int32),
        weights.astype(np.float32),
    )


def assert_same(real, ours) -> None:
    """Equal bit for bit, and of equal dtypes and shapes."""
    real = [np.asarray(each) for each in tf.nest.flatten(real)]
    ours = [np.asarray(each) for each in tf.nest.flatten(ours)]
    for expected, got in zip(real, ours, strict=True):
        assert expected.shape == got.shape
        if expected.ndim:
            assert expected.dtype == got.dtype
        np.testing.assert_array_equal(got, expected)
        if expected.dtype == np.float32:
            np.testing.assert_array_equal(
                got.view(np.int32), expected.view(np.int32)
            )


@pytest.mark.parametrize("cores", [1, 2, 4])
@pytest.mark.parametrize("chips", [1, 2, 4])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("kind", KINDS)
def test_pipeline(kind: str, combiner: str, chips: int, cores: int) -> None:
    """Two features of one table, and one of a table stacked after it."""
    rng = np.random.default_rng([chips, cores, len(combiner), len(kind)])
    shards = chips * cores
    features = [(16, 64, 0, 0), (8, 64, 0, 0), (16, 128, 64, cores)]
    total = sum(samples for samples, *_ in features)
    columns, begin = [], 0
    for samples, size, offset, rotation in features:
        given = batch(kind, rng, samples, size)
        settings = {
            "sample_count": samples,
            "combiner": combiner,
            "num_sc_per_chip": cores,
            "row_offset": begin,
            "col_offset": offset,
            "col_shift": rotation % shards,
            "num_sc_shards": shards,
            "stacked_table_sample_count": total,
        }
        real = gen_xla_ops.convert_to_list_of_sparse_core_coo_tensors(
            *given, **settings
        )
        assert_same(real, host_ops.convert_to_list_of_coo(*given, **settings))
        columns.append(real)
        begin += samples
    by_core = []
    for core in range(cores):
        lists = [
            [np.asarray(feature[part][core]) for feature in columns]
            for part in range(3)
        ]
        settings = {
            "sample_count_list": [f[0] // cores for f in features],
            "col_offset_list": [f[2] for f in features],
            "num_replica": chips,
            "table_vocab_size": 192,
            "feature_width": 8,
            "num_sc_per_chip": cores,
            "table_name": "first_second",
        }
        limits = {
            "max_ids_per_sparse_core": 256,
            "max_unique_ids_per_sparse_core": 256,
        }
        real = gen_xla_ops.sort_list_of_sparse_core_coo_tensors(
            *lists, **settings, **limits
        )
        assert_same(
            real, host_ops.sort_list_of_coo(*lists, **settings, **limits)
        )
        assert_same(
            gen_xla_ops.get_stats_from_list_of_sparse_core_coo_tensors(
                *lists, **settings
            ),
            host_ops.stats_of_coo(*lists, **settings),
        )
        by_core.append([np.asarray(each) for each in real])
    lists = [list(part) for part in zip(*by_core, strict=True)]
    # In turn room for all, and for some of the entries.
    for room, dropping in ((64, False), (64, True), (4, True), (2, True)):
        compare_buffers(lists, total // cores, chips, room, dropping)


def compare_buffers(
    lists: list, samples: int, chips: int, room: int, dropping: bool
) -> None:
    """The parts of the buffers in use; the rest is never written."""
    settings = {
        "sample_count_per_sc": samples,
        "num_replica": chips,
        "max_minibatches_per_sc": 64,
        "max_ids_per_chip_per_sample": room,
        "table_vocab_size": 192,
        "feature_width": 8,
        "table_name": "first_second",
        "allow_id_dropping": dropping,
    }
    real = gen_xla_ops.convert_to_sparse_core_csr_wrapped_coo_tensor(
        *lists, splits=np.int64(0), **settings
    )
    ours = csr_buffers.to_csr(*lists, **settings)
    used, end, _ = (int(each) for each in real[4:])
    assert_same(real[4:], ours[4:])
    assert_same(real[0][:used], ours[0][:used])
    assert [each.shape for each in real[:4]] == [
        each.shape for each in ours[:4]
    ]
    for buffer, mine in zip(real[1:4], ours[1:4], strict=True):
        assert_same(buffer[:end], mine[:end])


def converted(splits, ids, weights, **more) -> tuple[Callable, Callable]:
    settings = {
        "sample_count": 8,
        "combiner": "sum",
        "num_sc_per_chip": 4,
        "row_offset": 0,
        "col_offset": 0,
        "col_shift": 0,
        "num_sc_shards": 4,
        "stacked_table_sample_count": 8,
        **more,
    }
    given = (
        np.asarray(splits, np.int32),
        np.asarray(ids, np.int32),
        np.asarray(weights, np.float32),
    )
    return (
        lambda: gen_xla_ops.convert_to_list_of_sparse_core_coo_tensors(
            *given, **settings
        ),
        lambda: host_ops.convert_to_list_of_coo(*given, **settings),
    )


def sorted_by_shard(**limits) -> tuple[Callable, Callable]:
    lists = (
        [np.array([0, 0, 1], np.int32)],
        [np.array([1, 5, 1], np.int32)],
        [np.ones(3, np.float32)],
    )
    settings = {
        "sample_count_list": [2],
        "col_offset_list": [0],
        "num_replica": 1,
        "table_vocab_size": 64,
        "feature_width": 8,
        "num_sc_per_chip": 4,
        "max_ids_per_sparse_core": 256,
        "max_unique_ids_per_sparse_core": 256,
        "table_name": "first_second",
        **limits,
    }
    return (
        lambda: gen_xla_ops.sort_list_of_sparse_core_coo_tensors(
            *lists, **settings
        ),
        lambda: host_ops.sort_list_of_coo(*lists, **settings),
    )


def laid_out(counts: list[int], room: int, samples: int = 2):
    """`counts` entries for the shards of the first of 4 SparseCores."""
    total = sum(counts)
    begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    nothing = np.zeros(0, np.int32)
    lists = (
        [np.zeros(total, np.int32)] + [nothing] * 3,
        [np.arange(total, dtype=np.int32)] + [nothing] * 3,
        [np.ones(total, np.float32)] + [nothing.astype(np.float32)] * 3,
        [begins] + [np.zeros_like(begins)] * 3,
    )
    settings = {
        "sample_count_per_sc": samples,
        "num_replica": 1,
        "max_minibatches_per_sc": 64,
        "max_ids_per_chip_per_sample": room,
        "table_vocab_size": 64,
        "feature_width": 8,
        "table_name": "first_second",
        "allow_id_dropping": False,
    }
    return (
        lambda: gen_xla_ops.convert_to_sparse_core_csr_wrapped_coo_tensor(
            *lists, splits=np.int64(0), **settings
        ),
        lambda: csr_buffers.to_csr(*lists, **settings),
    )


DENSE = np.zeros(0)
EIGHT, ONES = np.arange(8), np.ones(8)


@pytest.mark.parametrize(
    "real, ours",
    [
        converted(DENSE, EIGHT, ONES, num_sc_shards=12),
        converted(DENSE, EIGHT, ONES, combiner="max"),
        converted(DENSE, EIGHT, np.ones(3)),
        converted(DENSE, np.arange(5), np.ones(5)),
        converted(DENSE, np.arange(12), np.ones(12)),
        converted([0, 1, 2], np.arange(2), np.ones(2)),
        converted(np.arange(10), np.arange(9), np.ones(9)),
        converted([[1, 0], [0, 0]], [3, 4], np.ones(2)),
        converted([[0, 0], [8, 0]], [3, 4], np.ones(2)),
        sorted_by_shard(max_ids_per_sparse_core=2),
        sorted_by_shard(max_unique_ids_per_sparse_core=1),
        sorted_by_shard(
            max_ids_per_sparse_core=1, max_unique_ids_per_sparse_core=1
        ),
        laid_out([1, 1, 1, 0], 1),
        laid_out([1, 1, 1, 0], 2),
        laid_out([1, 20, 1, 0], 2),
        laid_out([3, 12, 2, 7], 3),
        laid_out([1, 1, 1, 0], 3, samples=1),
    ],
)
def test_messages(real: Callable, ours: Callable) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError) as expected:
        real()
    with pytest.raises(ValueError) as got:
        ours()
    # TensorFlow puts the node before the message, and the operation after.
    text = expected.value.message.split("}} ", 1)[1].rsplit("[Op:", 1)[0]
    assert str(got.value).strip() == text.strip()


@pytest.mark.parametrize(
    "real, ours",
    [
        converted(DENSE, EIGHT, np.float32(2)),
        converted([0] * 9, [], []),
        converted(np.zeros((0, 2)), [], []),
        converted(DENSE, EIGHT, ONES, sample_count=8, row_offset=8),
        # Ids that no table has: nobody checks them.
        converted(DENSE, [-1, -5, 70_000, 2**31 - 1, 0, 0, 0, 0], ONES),
    ],
)
def test_odd_inputs(real: Callable, ours: Callable) -> None:
    assert_same(real(), ours())
