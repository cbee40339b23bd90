"""The buffer in which a TPU gets its host's sorted batch.

`host_ops` draws it; `to_csr` is the last of the operations described there,
and `entries` reads the buffer as the chips do.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

ALIGNMENT = 8
PADDING_ID = np.int32(2**31 - 1)
PADDING_GAIN = np.float32(2**31 - 1)


def to_csr(
    sorted_row_ids_list: Sequence[np.ndarray],
    sorted_col_ids_list: Sequence[np.ndarray],
    sorted_gains_list: Sequence[np.ndarray],
    id_counts_list: Sequence[np.ndarray],
    *,
    sample_count_per_sc: int,
    num_replica: int,
    max_minibatches_per_sc: int,
    max_ids_per_chip_per_sample: int,
    allow_id_dropping: bool,
    **unused: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int, int, int]:
    """Lays out the sorted entries of a chip's SparseCores in one buffer.

    Args:
        sorted_row_ids_list: Samples, one array a SparseCore.
        sorted_col_ids_list: Rows in their shards.
        sorted_gains_list: Gains.
        id_counts_list: `[shards + 1]` offsets, one array a SparseCore.
        sample_count_per_sc: Samples of one SparseCore, all features.
        num_replica: Chips.
        max_minibatches_per_sc: Room for row pointers.
        max_ids_per_chip_per_sample: Room for entries, padding included.
        allow_id_dropping: Whether entries that find no room are left out.
        unused: Attributes of the operation that do not matter here.

    Returns:
        Row pointers, samples, rows, gains; how much of the row pointers and
        of the others is in use; the number of minibatches, 1.

    Raises:
        ValueError: The entries find no room, or the room is no multiple of 8.
    """
    cores = len(sorted_row_ids_list)
    shards = num_replica * cores
    room = max_ids_per_chip_per_sample * sample_count_per_sc * cores
    if room % ALIGNMENT:
        raise ValueError(
            f"The max_ids_per_chip is set to be {room} which is not divisible "
            f"by the xla_pad_size {ALIGNMENT} ."
        )
    pointers_per_core = aligned(shards)
    pointers = np.zeros(
        max_minibatches_per_sc * cores * pointers_per_core, np.int32
    )
    sources = (sorted_row_ids_list, sorted_col_ids_list, sorted_gains_list)
    buffers = (
        np.full(room, PADDING_ID),
        np.full(room, PADDING_ID),
        np.full(room, PADDING_GAIN),
    )
    remaining = sum(int(counts[-1]) for counts in id_counts_list)
    end = 0
    for core in range(cores):
        base = core * pointers_per_core
        for shard in range(shards):
            begin = aligned(end)
            entries = slice(*id_counts_list[core][shard : shard + 2])
            wanted = int(entries.stop - entries.start)
            fits = min(wanted, room - begin)
            if fits < wanted and not allow_id_dropping:
                raise ValueError(
                    f"The max_ids_per_chip is set to be {room} which is not "
                    "going to fit all ids. The remaining id count is "
                    f"{remaining} . Please consider setting the "
                    "allow_id_dropping to be true. "
                )
            end = begin + fits
            for buffer, source in zip(buffers, sources, strict=True):
                buffer[begin:end] = source[core][entries][:fits]
            pointers[base + shard] = end
            remaining -= wanted
        pointers[base + shards : base + pointers_per_core] = aligned(end)
    used = cores * pointers_per_core
    return pointers, *buffers, used, aligned(end), 1


def aligned(size: int) -> int:
    """The next multiple of 8."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Entries(NamedTuple):
    """What one chip looks up in one stack of tables.

    Attributes:
        samples: int32 `[n]`, the row among the chip's activations.
        rows: int32 `[n]`, the row of the stack: all shards, one after the
            other.
        gains: float32 `[n]`, what the row counts in the sample.
    """

    samples: np.ndarray
    rows: np.ndarray
    gains: np.ndarray


def entries(
    row_pointers: np.ndarray,
    sample_ids: np.ndarray,
    row_ids: np.ndarray,
    gains: np.ndarray,
    *,
    sparsecores: int,
    shards: int,
    samples: int,
    rows_per_shard: int,
) -> Entries:
    """Reads the buffer of one chip.

    Args:
        row_pointers: Of `to_csr`, as are the next three.
        sample_ids: The sample among those of its SparseCore.
        row_ids: The row in its shard.
        gains: What the row counts in the sample.
        sparsecores: SparseCores of the chip.
        shards: SparseCores of all chips.
        samples: Rows of the chip's activations.
        rows_per_shard: Rows of the stack in one shard.

    Raises:
        ValueError: A sample or a row lies outside of where it must be. A TPU
            would read or write some other place.
    """
    pointers = row_pointers[: sparsecores * aligned(shards)]
    ends = pointers.reshape(sparsecores, -1)[:, :shards].ravel()
    before = np.concatenate([[0], ends[:-1]])
    starts = -(-before // ALIGNMENT) * ALIGNMENT
    counts = ends - starts
    group = np.repeat(np.arange(ends.size), counts)
    place = np.arange(group.size) + np.repeat(
        starts - np.cumsum(counts) + counts, counts
    )
    core, shard = group // shards, group % shards
    sample, row = sample_ids[place], row_ids[place]
    per_core = samples // sparsecores
    for values, limit, name in (
        (sample, per_core, "sample of a SparseCore"),
        (row, rows_per_shard, "row of a table's shard"),
    ):
        outside = values[(values < 0) | (values >= limit)]
        if outside.size:
            raise ValueError(
                f"A {name} must lie in [0, {limit}). Received: {outside[0]}. "
                "Is an id outside of [0, vocabulary size)?"
            )
    return Entries(
        (core * per_core + sample).astype(np.int32),
        (shard * rows_per_shard + row).astype(np.int32),
        gains[place],
    )
