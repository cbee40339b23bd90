"""The C floor as a contender; `setup.sh` compiles it."""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.contender import LEARNING_RATE, Contender
from benchmarks.workloads import Batch, Workload

LIBRARY = pathlib.Path(__file__).parent / "build" / "floor.so"


class Floor(Contender):
    """Adagrad only, on bags without weights.

    NumPy asks for huge pages for its arrays. Where the others are to have
    4 KiB pages, set NUMPY_MADVISE_HUGEPAGE=0 before NumPy is imported.
    """

    title = "C floor"

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._library = ctypes.CDLL(str(LIBRARY))
        self._offsets = np.cumsum([0, *workload.tables])
        shape = (int(self._offsets[-1]), workload.dim)
        random = np.random.default_rng(1)
        self._table = random.random(shape, dtype=np.float32)
        self._accumulator = np.full(shape, 0.1, np.float32)
        outputs = (workload.batch_size, len(workload.features), workload.dim)
        self._out = np.empty(outputs, np.float32)

    def inputs_of(self, batch: Batch) -> Any:
        ids, lengths = [], []
        for feature, one in zip(self.workload.features, batch.ids, strict=True):
            ids.append(one.values + self._offsets[feature.table])
            lengths.append(np.diff(one.splits))
        splits = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        return (
            np.concatenate(ids).astype(np.int64),
            splits.astype(np.int64),
            batch.gradients.transpose(1, 0, 2).copy(),
        )

    def forward(self, inputs: Any) -> Any:
        ids, splits, _ = inputs
        self._library.pool(
            _pointer(self._table),
            _pointer(ids),
            _pointer(splits),
            *self._sizes(),
            _pointer(self._out),
        )
        return self._out

    def outputs_of(self, inputs: Any) -> np.ndarray:
        return self.forward(inputs).transpose(1, 0, 2).copy()

    def train(self, inputs: Any) -> None:
        self.forward(inputs)
        ids, splits, gradient = inputs
        self._library.adagrad(
            _pointer(self._table),
            _pointer(self._accumulator),
            ctypes.c_int64(len(self._table)),
            _pointer(ids),
            _pointer(splits),
            *self._sizes(),
            _pointer(gradient),
            ctypes.c_float(LEARNING_RATE),
            ctypes.c_float(1e-7),
        )

    def _sizes(self) -> tuple[Any, ...]:
        return (
            ctypes.c_int64(len(self.workload.features)),
            ctypes.c_int64(self.workload.batch_size),
            ctypes.c_int64(self.workload.dim),
            ctypes.c_int(self.workload.combiner == "mean"),
        )

    def set_tables(self, values: Sequence[np.ndarray]) -> None:
        self._table[:] = np.concatenate(values)

    def get_tables(self) -> list[np.ndarray]:
        return np.split(self._table.copy(), self._offsets[1:-1])


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)
