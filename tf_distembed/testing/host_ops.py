"""The host operations of the SparseCore pipeline, in NumPy.

The host next to a TPU sorts each chip's batch so that every SparseCore finds
what it has to look up in one piece. TensorFlow has four operations for that,
with kernels in the `tensorflow-tpu` wheel only; here is what they compute.

With C chips of n SparseCores there are S = C n shards (a power of two), and
row `id` of a table lives in

    shard (id + rotation) mod S,    row  id div S + row offset

where rotation and row offset are those of the table in its stack. On the way
the two are one number, the *column* `row * S + shard`. The samples of a chip's
batch are dealt to its SparseCores in blocks, in order.

    1. convert_to_list_of_coo: one feature -> for each SparseCore of the chip
       its (sample, column, gain) entries; gains are the combiner's weights.
    2. sort_list_of_coo: one SparseCore, all features of a stack -> entries
       grouped by shard; the same id twice in a sample becomes one entry.
    3. to_csr: all SparseCores of the chip -> one buffer. With S = 4, n = 2:

           row pointers   e0 e1 e2 e3 -  -  -  -  e4 e5 e6 e7 -  -  -  -
                          SparseCore 0            SparseCore 1
           entries        |shard 0 |shard 1 |shard 2 ...

       e is where the entries of a shard end; the next ones begin at the next
       multiple of 8, and what lies between is padding (`csr_buffers`).

`stats_of_coo` counts what step 2 checks against the limits. Messages are those
of TensorFlow's kernels, so that code which explains them can be tested.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Coo = tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]


def convert_to_list_of_coo(
    indices_or_row_splits: np.ndarray,
    values: np.ndarray,
    weights: np.ndarray,
    *,
    sample_count: int,
    num_sc_per_chip: int,
    row_offset: int,
    col_offset: int,
    col_shift: int,
    num_sc_shards: int,
    stacked_table_sample_count: int,
    combiner: str,
) -> Coo:
    """Deals one feature's ids to the SparseCores of a chip.

    Args:
        indices_or_row_splits: int32; `[0]` for dense ids, `[samples + 1]` row
            splits for ragged ones, `[ids, 2]` indices for sparse ones.
        values: int32 `[ids]`.
        weights: float32 `[ids]`, or a scalar.
        sample_count: Rows of the feature in the chip's batch.
        num_sc_per_chip: SparseCores of the chip.
        row_offset: Rows of the stack's features before this one.
        col_offset: Where the table begins in each shard, times the shards.
        col_shift: The table's rotation.
        num_sc_shards: Shards, over all chips.
        stacked_table_sample_count: Rows of all features of the stack.
        combiner: "sum", "mean" or "sqrtn".

    Returns:
        Samples, columns and gains, each with one array a SparseCore. Sample
        numbers of a SparseCore begin where those of the one before it end.

    Raises:
        ValueError: The shards are not a power of two, or the input does not
            hold `sample_count` rows.
    """
    if num_sc_shards & (num_sc_shards - 1):
        raise ValueError(
            f"num_sc_shards {num_sc_shards} is not a power of two."
        )
    if combiner not in ("sum", "mean", "sqrtn"):
        raise ValueError(
            'Invalid combiner: only "sum", "mean", "sqrtn", and "custom" are '
            f"supported, but got {combiner}"
        )
    if np.ndim(weights) and values.size != weights.size:
        raise ValueError(
            "Values and weights should have same elements. But got "
            f"{values.size} elements for values and {weights.size} elements "
            "for weights."
        )
    weights = np.broadcast_to(weights, values.shape)
    samples = _samples(indices_or_row_splits, values.size, sample_count)
    scale = _scale(samples, weights, sample_count, combiner)
    # Neighbours with the same id are merged already here; the rest later.
    first = _differs(samples) | _differs(values)
    gains = _sum_runs(weights, first)
    samples, values = samples[first], values[first]
    if scale is not None:
        gains = gains * scale[samples]
    within = num_sc_shards - 1
    columns = ((values + col_shift) & within) + (values & ~within) + col_offset
    per_core = sample_count // num_sc_per_chip
    stacked_per_core = stacked_table_sample_count // num_sc_per_chip
    result: Coo = ([], [], [])
    for core in range(num_sc_per_chip):
        own = samples // per_core == core if per_core else samples < 0
        local = samples[own] % per_core if per_core else samples[own]
        begin = row_offset // num_sc_per_chip + stacked_per_core * core
        result[0].append((local + begin).astype(np.int32))
        result[1].append(columns[own].astype(np.int32))
        result[2].append(gains[own].astype(np.float32))
    return result


def sort_list_of_coo(
    row_ids_list: Sequence[np.ndarray],
    col_ids_list: Sequence[np.ndarray],
    gains_list: Sequence[np.ndarray],
    *,
    sample_count_list: Sequence[int],
    col_offset_list: Sequence[int],
    num_replica: int,
    num_sc_per_chip: int,
    max_ids_per_sparse_core: int,
    max_unique_ids_per_sparse_core: int,
    table_name: str,
    **unused: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Groups the entries of one SparseCore, all features of a stack, by shard.

    Args:
        row_ids_list: Samples, one array a feature.
        col_ids_list: Columns.
        gains_list: Gains.
        sample_count_list: Samples of the SparseCore, for each feature.
        col_offset_list: Where each feature's table begins.
        num_replica: Chips.
        num_sc_per_chip: SparseCores of a chip.
        max_ids_per_sparse_core: Limit of entries for one shard.
        max_unique_ids_per_sparse_core: Limit of different ids for one shard.
        table_name: The stack, for messages.
        unused: Attributes of the operation that do not matter here.

    Returns:
        Samples (counted within the SparseCore), rows in the shard, gains,
        and `[shards + 1]` offsets at which the entries of each shard begin.

    Raises:
        ValueError: A limit is exceeded.
    """
    shards = num_replica * num_sc_per_chip
    samples, columns, gains, unique = _merged(
        row_ids_list, col_ids_list, gains_list, col_offset_list
    )
    ids_of, unique_of = _counts(columns, unique, shards)
    for shard in range(shards):
        for kind, count, limit in (
            ("", ids_of[shard], max_ids_per_sparse_core),
            ("unique ", unique_of[shard], max_unique_ids_per_sparse_core),
        ):
            if count > limit:
                raise ValueError(
                    f"Sparse core {shard} gets {count} {kind}ids while the "
                    f"max {kind}ids per sparse core is set to be {limit} for "
                    f"table {table_name}"
                )
    order = np.argsort(columns % shards, kind="stable")
    return (
        (samples[order] % sum(sample_count_list)).astype(np.int32),
        (columns[order] // shards).astype(np.int32),
        gains[order],
        np.concatenate([[0], np.cumsum(ids_of)]).astype(np.int32),
    )


def stats_of_coo(
    row_ids_list: Sequence[np.ndarray],
    col_ids_list: Sequence[np.ndarray],
    gains_list: Sequence[np.ndarray],
    *,
    col_offset_list: Sequence[int],
    num_replica: int,
    num_sc_per_chip: int,
    **unused: Any,
) -> tuple[np.int32, np.int32]:
    """The most entries, and the most different ids, that one shard gets.

    The arguments are those of `sort_list_of_coo`.
    """
    _, columns, _, unique = _merged(
        row_ids_list, col_ids_list, gains_list, col_offset_list
    )
    ids_of, unique_of = _counts(columns, unique, num_replica * num_sc_per_chip)
    return np.int32(ids_of.max()), np.int32(unique_of.max())


def _samples(
    indices_or_row_splits: np.ndarray, ids: int, sample_count: int
) -> np.ndarray:
    """The sample of each id."""
    given = indices_or_row_splits
    if given.ndim == 2:
        rows = given[:, 0]
        if rows.size != ids or np.any(np.diff(rows) < 0):
            raise ValueError(
                "Invalid indices_or_row_splits input, indices of SparseTensor "
                "need to be sorted in ascending (non-decreasing) order."
            )
        if ids and rows[-1] >= sample_count:
            raise ValueError(
                "Invalid indices_or_row_splits input, indices of SparseTensor "
                f"contained a row_id {rows[-1]} that was >= the sample count "
                f"({sample_count})."
            )
        return rows
    if given.size == 0:
        if ids != sample_count:
            raise ValueError(
                "Dense tensor input should have values elements number the "
                f"same as the sample count. But got {ids} elements for values "
                f"and sample count as {sample_count}."
            )
        return np.arange(ids, dtype=np.int32)
    if given.size != sample_count + 1:
        raise ValueError(
            "Ragged tensor input should have row_splits elements number the "
            f"same as the sample count + 1. But got {given.size} elements for "
            f"row_splits and sample count as {sample_count}."
        )
    return np.repeat(np.arange(sample_count, dtype=np.int32), np.diff(given))


def _scale(
    samples: np.ndarray,
    weights: np.ndarray,
    sample_count: int,
    combiner: str,
) -> np.ndarray | None:
    """What the combiner divides a sample's weights by, inverted."""
    if combiner == "sum":
        return None
    total = np.zeros(sample_count, np.float32)
    np.add.at(
        total, samples, weights if combiner == "mean" else weights * weights
    )
    if combiner == "sqrtn":
        total = np.sqrt(total)
    scale = np.zeros_like(total)
    np.divide(np.float32(1), total, out=scale, where=total != 0)
    return scale


def _differs(values: np.ndarray) -> np.ndarray:
    """Whether each value differs from the one before it."""
    differs = np.ones(values.shape, bool)
    differs[1:] = values[1:] != values[:-1]
    return differs


def _sum_runs(values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The sum of each run of values, in order; `first` marks their heads."""
    sums = values[first].astype(np.float32)
    run = np.cumsum(first) - 1
    np.add.at(sums, run[~first], values[~first])
    return sums


def _merged(
    row_ids_list: Sequence[np.ndarray],
    col_ids_list: Sequence[np.ndarray],
    gains_list: Sequence[np.ndarray],
    col_offset_list: Sequence[int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One entry for each id of a sample, table by table, sorted by column.

    Returns samples, columns, gains, and which entries are the first of their
    column.
    """
    parts = []
    for offset in sorted(set(col_offset_list)):
        features = [
            i for i, begin in enumerate(col_offset_list) if begin == offset
        ]
        samples, columns, gains = (
            np.concatenate([source[i] for i in features])
            for source in (row_ids_list, col_ids_list, gains_list)
        )
        order = np.argsort(columns, kind="stable")
        samples, columns = samples[order], columns[order]
        first = _differs(samples) | _differs(columns)
        parts.append(
            (
                samples[first],
                columns[first],
                _sum_runs(gains[order], first),
                _differs(columns[first]),
            )
        )
    samples, columns, gains, unique = (
        np.concatenate(part) for part in zip(*parts, strict=True)
    )
    return samples, columns, gains, unique


def _counts(
    columns: np.ndarray, unique: np.ndarray, shards: int
) -> tuple[np.ndarray, np.ndarray]:
    """Entries, and different ids, of each shard."""
    shard = columns % shards
    return (
        np.bincount(shard, minlength=shards),
        np.bincount(shard[unique], minlength=shards),
    )
