"""Arrays of rows in `.npy` files, written and read some rows at a time.

By plain reads and writes: pages of a memory map count as memory of the
process, and once all rows have passed that is the whole array.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class RowFile:
    """An array in a `.npy` file; its rows are read when it is sliced.

    The file is held open, so that it may be replaced meanwhile.

    Args:
        path: Of the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no array of numbers in the order of its rows, or has
            not the size that it says.

    Attributes:
        shape: Of the whole array.
        dtype: Of its elements.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        read_header: Any = _HEADERS.get(np.lib.format.read_magic(self._file))
        if read_header is None:
            raise ValueError("it has an unknown version of the .npy format")
        self.shape, by_columns, self.dtype = read_header(self._file)
        self._start = self._file.tell()
        expected = self._start + math.prod(self.shape) * self.dtype.itemsize
        found = os.fstat(self._file.fileno()).st_size
        if found != expected or by_columns or self.dtype.hasobject:
            raise ValueError(
                f"it has {found:,} bytes with dtype {self.dtype}, expected "
                f"{expected:,} bytes of numbers, row by row"
            )

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, step = rows.indices(self.shape[0])
        shape = (max(stop - start, 0), *self.shape[1:])
        values = np.empty(shape, self.dtype)
        row_bytes = math.prod(shape[1:]) * self.dtype.itemsize
        self._file.seek(self._start + start * row_bytes)
        as_bytes = values.reshape(-1).view(np.uint8)
        read = self._file.readinto(as_bytes.data)
        if read != values.nbytes:
            raise OSError(f"'{self._file.name}' became shorter while in use.")
        return values[::step]


def write_row_file(
    path: str | os.PathLike[str],
    shape: tuple[int, ...],
    dtype: str,
    blocks: Iterable[np.ndarray],
) -> None:
    """Writes an array block by block, and waits until the disk has it.

    Args:
        path: Where to.
        shape: Of the whole array.
        dtype: Of the file; blocks of another are converted.
        blocks: All rows, in order.
    """
    header = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
        "fortran_order": False,
        "shape": shape,
    }
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).data)
        file.flush()
        os.fsync(file.fileno())
