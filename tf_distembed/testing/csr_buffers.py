"""The buffer in which a TPU gets its host's sorted batch.

`host_ops` draws it; this is the last of the operations described there.
"""

from collections.abc import Sequence
from typing import Any

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
