"""The host operations in NumPy: worked numbers, limits, and what they hold.

`sparsecore_kernels_check.py` compares them with TensorFlow's own kernels, in
an environment that has those.
"""

from __future__ import annotations

import collections

import numpy as np
import pytest

from tf_distembed.testing import csr_buffers, host_ops

NO_SPLITS = np.zeros(0, np.int32)
STACK = {
    "num_sc_per_chip": 2,
    "row_offset": 0,
    "col_offset": 0,
    "col_shift": 0,
    "num_sc_shards": 4,
}


def convert(splits, values, weights, combiner="sum", samples=4, **more):
    settings = {
        **STACK,
        "sample_count": samples,
        "stacked_table_sample_count": samples,
        "combiner": combiner,
        **more,
    }
    return host_ops.convert_to_list_of_coo(
        np.asarray(splits, np.int32),
        np.asarray(values, np.int32),
        np.asarray(weights, np.float32),
        **settings,
    )


def sort(samples, columns, gains, **more):
    settings = {
        "sample_count_list": [2] * len(samples),
        "col_offset_list": [0] * len(samples),
        "num_replica": 1,
        "num_sc_per_chip": 4,
        "max_ids_per_sparse_core": 256,
        "max_unique_ids_per_sparse_core": 256,
        "table_name": "ta_tb",
        **more,
    }
    return host_ops.sort_list_of_coo(
        [np.asarray(s, np.int32) for s in samples],
        [np.asarray(c, np.int32) for c in columns],
        [np.asarray(g, np.float32) for g in gains],
        **settings,
    )


def lists(arrays) -> list:
    return [array.tolist() for array in arrays]


def test_dense_ids_are_dealt_to_the_sparsecores_in_blocks() -> None:
    samples, columns, gains = convert(NO_SPLITS, [7, 1, 2, 0], [1, 1, 1, 1])
    assert lists(samples) == [[0, 1], [2, 3]]
    assert lists(columns) == [[7, 1], [2, 0]]
    assert lists(gains) == [[1, 1], [1, 1]]


def test_column_turns_by_the_rotation_and_begins_at_the_offset() -> None:
    # With 4 shards and rotation 3: id 6 is in shard (6 + 3) mod 4 = 1, row
    # 6 div 4 = 1; the table begins at row 2, so the column is (1 + 2) 4 + 1.
    _, columns, _ = convert(
        [0, 1, 1, 1, 1], [6], [1], col_shift=3, col_offset=8
    )
    assert lists(columns) == [[13], []]


def test_combiner_is_taken_before_ids_of_a_sample_are_merged() -> None:
    # mean: 1 + 2 + 4 + 8 = 15; the two neighbours with id 3 are one entry.
    _, columns, gains = convert(
        [[0, 0], [0, 1], [0, 2], [0, 3]],
        [3, 4, 3, 3],
        [1, 2, 4, 8],
        "mean",
    )
    assert columns[0].tolist() == [3, 4, 3]
    np.testing.assert_allclose(gains[0], [1 / 15, 2 / 15, 12 / 15], rtol=1e-6)


@pytest.mark.parametrize(
    "combiner, weights, expected",
    [
        ("sum", [3, 4], [3, 4]),
        ("mean", [3, 4], [3 / 7, 4 / 7]),
        ("sqrtn", [3, 4], [0.6, 0.8]),
        ("sqrtn", [-3, 4], [-0.6, 0.8]),
        ("mean", [1, -1], [0, 0]),
        ("sqrtn", [0, 0], [0, 0]),
    ],
)
def test_gains(combiner: str, weights: list, expected: list) -> None:
    _, _, gains = convert([0, 2, 2, 2, 2], [8, 9], weights, combiner)
    np.testing.assert_allclose(gains[0], expected, rtol=1e-6)


def test_sort_merges_ids_of_a_sample_and_orders_by_shard() -> None:
    samples, rows, gains, begins = sort(
        [[1, 0, 1], [0, 1]],
        [[4, 4, 9], [4, 12]],
        [[1, 2, 3], [4, 5]],
    )
    # Column 9 is row 2 of shard 1; the others are rows 1 and 3 of shard 0.
    assert samples.tolist() == [1, 0, 1, 1]
    assert rows.tolist() == [1, 1, 3, 2]
    assert gains.tolist() == [1, 6, 5, 3]
    assert begins.tolist() == [0, 3, 4, 4, 4]


def test_stats_count_what_the_limits_are_compared_with() -> None:
    stats = host_ops.stats_of_coo(
        [np.array([0, 0, 1, 1])],
        [np.array([1, 5, 1, 2])],
        [np.ones(4, np.float32)],
        col_offset_list=[0],
        num_replica=1,
        num_sc_per_chip=4,
    )
    assert stats == (3, 2)


@pytest.mark.parametrize(
    "limits, message",
    [
        (
            {"max_ids_per_sparse_core": 2},
            "Sparse core 1 gets 3 ids while the max ids per sparse core is "
            "set to be 2 for table ta_tb",
        ),
        (
            {"max_unique_ids_per_sparse_core": 1},
            "Sparse core 1 gets 2 unique ids while the max unique ids per "
            "sparse core is set to be 1 for table ta_tb",
        ),
    ],
)
def test_limit_is_exceeded(limits: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        sort([[0, 0, 1]], [[1, 5, 1]], [[1, 1, 1]], **limits)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"splits": NO_SPLITS, "num_sc_shards": 12},
            "num_sc_shards 12 is not a power of two.",
        ),
        (
            {"splits": NO_SPLITS, "combiner": "max"},
            'Invalid combiner: only "sum", "mean", "sqrtn", and "custom" are '
            "supported, but got max",
        ),
        (
            {"splits": NO_SPLITS, "weights": [1, 1]},
            "Values and weights should have same elements. But got 4 elements "
            "for values and 2 elements for weights.",
        ),
        (
            {"splits": NO_SPLITS, "samples": 8},
            "Dense tensor input should have values elements number the same "
            "as the sample count. But got 4 elements for values and sample "
            "count as 8.",
        ),
        (
            {"splits": [0, 2, 4]},
            "Ragged tensor input should have row_splits elements number the "
            "same as the sample count + 1. But got 3 elements for row_splits "
            "and sample count as 4.",
        ),
        (
            {"splits": [[0, 0], [1, 0], [0, 1], [2, 0]]},
            "Invalid indices_or_row_splits input, indices of SparseTensor "
            "need to be sorted in ascending (non-decreasing) order.",
        ),
        (
            {"splits": [[0, 0], [1, 0], [2, 0], [4, 0]]},
            "Invalid indices_or_row_splits input, indices of SparseTensor "
            "contained a row_id 4 that was >= the sample count (4).",
        ),
    ],
)
def test_input_is_refused_in_tensorflows_words(
    arguments: dict, message: str
) -> None:
    arguments = {"values": [1, 2, 3, 4], "weights": [1] * 4, **arguments}
    with pytest.raises(ValueError) as caught:
        convert(**arguments)
    assert str(caught.value) == message


# Three ids for shards 0, 1 and 2 of the first of two SparseCores, one for
# shard 0 of the second.
SORTED = (
    [np.array([0, 1, 0]), np.array([1])],
    [np.array([7, 8, 9]), np.array([5])],
    [np.float32([1, 2, 3]), np.float32([4])],
    [np.array([0, 1, 2, 3, 3]), np.array([0, 1, 1, 1, 1])],
)


def csr(room: int, **more):
    settings = {
        "sample_count_per_sc": 2,
        "num_replica": 2,
        "max_minibatches_per_sc": 64,
        "max_ids_per_chip_per_sample": room,
        "allow_id_dropping": False,
        **more,
    }
    return csr_buffers.to_csr(*SORTED, **settings)


def test_groups_of_the_buffer_begin_at_multiples_of_8() -> None:
    pointers, samples, rows, gains, used, end, minibatches = csr(64)
    assert pointers[:used].tolist() == [
        *(1, 9, 17, 24, 24, 24, 24, 24),
        *(25, 32, 32, 32, 32, 32, 32, 32),
    ]
    assert (used, end, minibatches) == (16, 32, 1)
    assert len(pointers) == 64 * 16
    assert len(samples) == len(rows) == len(gains) == 64 * 2 * 2
    places = [0, 8, 16, 24]
    assert samples[places].tolist() == [0, 1, 0, 1]
    assert rows[places].tolist() == [7, 8, 9, 5]
    assert gains[places].tolist() == [1, 2, 3, 4]
    padding = np.delete(rows, places)
    assert set(padding.tolist()) == {2**31 - 1}


def test_buffer_that_is_too_small() -> None:
    with pytest.raises(
        ValueError,
        match="The max_ids_per_chip is set to be 8 which is not going to fit "
        "all ids. The remaining id count is 3 . Please consider setting the "
        "allow_id_dropping to be true. ",
    ):
        csr(2)
    pointers, _, rows, *_, end, _ = csr(2, allow_id_dropping=True)
    assert (rows[0], end) == (7, 8)
    assert pointers[:4].tolist() == [1, 8, 8, 8]


def test_buffer_whose_size_is_no_multiple_of_8() -> None:
    with pytest.raises(
        ValueError,
        match="The max_ids_per_chip is set to be 12 which is not divisible by "
        "the xla_pad_size 8 .",
    ):
        csr(3)


@pytest.mark.parametrize("chips, cores", [(1, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_chips_read_the_coefficients_that_the_ids_had(
    chips: int, cores: int, combiner: str
) -> None:
    """Through all operations and back: two features of two stacked tables."""
    rng = np.random.default_rng(chips)
    shards, samples = chips * cores, 4 * cores
    # The second table begins after the 64 rows of the first, turned by one
    # chip.
    offsets, turns = [0, 64], [0, cores % shards]
    expected: dict[tuple[int, int], float] = collections.defaultdict(float)
    parts = []
    for feature in range(2):
        lengths = rng.integers(0, 5, samples)
        ids = rng.integers(0, 64, lengths.sum())
        weights = rng.random(len(ids)) + 0.1
        splits = np.concatenate([[0], np.cumsum(lengths)])
        for sample in range(samples):
            own = slice(splits[sample], splits[sample + 1])
            w = weights[own]
            if combiner == "mean":
                w = w / w.sum()
            elif combiner == "sqrtn":
                w = w / np.sqrt((w * w).sum())
            # A SparseCore's samples of all features stand together.
            core, local = divmod(sample, 4)
            row = core * 8 + feature * 4 + local
            for i, each in zip(ids[own], w, strict=True):
                shard = (i + turns[feature]) % shards
                place = shard * (128 // shards) + (
                    i // shards + offsets[feature] // shards
                )
                expected[row, place] += each
        parts.append(
            convert(
                splits,
                ids,
                weights,
                combiner,
                samples,
                num_sc_per_chip=cores,
                num_sc_shards=shards,
                row_offset=feature * samples,
                col_offset=offsets[feature],
                col_shift=turns[feature],
                stacked_table_sample_count=2 * samples,
            )
        )
    by_core = [
        sort(
            *([part[k][core] for part in parts] for k in range(3)),
            sample_count_list=[4, 4],
            col_offset_list=offsets,
            num_replica=chips,
            num_sc_per_chip=cores,
        )
        for core in range(cores)
    ]
    buffer = csr_buffers.to_csr(
        *map(list, zip(*by_core, strict=True)),
        sample_count_per_sc=8,
        num_replica=chips,
        max_minibatches_per_sc=64,
        max_ids_per_chip_per_sample=64,
        allow_id_dropping=False,
    )
    read = csr_buffers.entries(
        *buffer[:4],
        sparsecores=cores,
        shards=shards,
        samples=2 * samples,
        rows_per_shard=128 // shards,
    )
    got = {
        (s, r): g
        for s, r, g in zip(
            read.samples.tolist(), read.rows.tolist(), read.gains, strict=True
        )
    }
    assert len(got) == len(read.rows)  # One entry for an id of a sample.
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key] == pytest.approx(value, rel=1e-6)


def test_reading_refuses_a_row_outside_of_its_shard() -> None:
    pointers, samples, rows, gains, *_ = csr(64)
    with pytest.raises(ValueError, match=r"must lie in \[0, 8\). Received: 8"):
        csr_buffers.entries(
            pointers,
            samples,
            rows,
            gains,
            sparsecores=2,
            shards=4,
            samples=4,
            rows_per_shard=8,
        )
