"""The one logical state of a layer's tables, whatever holds them.

For each table `values`, each slot of its optimizer under Keras' slot name, and
`step`. Every file holds these entries and nothing else; no variable of a
backend is ever written. A file is checked whole before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_distembed.backends.base import Backend
from tf_distembed.initial_values import BLOCK_ROWS
from tf_distembed.row_files import RowFile
from tf_distembed.tables import STEP, VALUES


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of the logical state.

    Attributes:
        table: Name of the table.
        slot: `"values"`, the name of a slot, or `"step"`.
        shape: `(vocabulary_size, embedding_dim)`, or `()` for a step count.
        dtype: Name of its dtype.
    """

    table: str
    slot: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def key(self) -> str:
        """Its name in a file."""
        return f"{self.table}:{self.slot}"

    @property
    def checkpoint_key(self) -> str:
        """The same in a `tf.train.Checkpoint`.

        TensorFlow escapes dots in the names of tensors twice when it writes
        them and once when it looks for them.
        """
        return self.key.replace("%", "%25").replace(".", "%2E")

    def record(self) -> dict[str, Any]:
        """What an index says of it."""
        return {**dataclasses.asdict(self), "shape": list(self.shape)}


@dataclasses.dataclass(frozen=True)
class Found:
    """What a file holds under a key; a dtype of None may be any."""

    shape: tuple[int | None, ...]
    dtype: str | None = None


class TableState:
    """Reads and writes the logical state through the backends that hold it."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends

    def entries(self) -> list[Entry]:
        """All entries, tables in order of configuration."""
        found = []
        for backend in self._backends:
            for table, slots in backend.slot_shapes().items():
                dtype = backend.slot_dtype(table)
                for slot, shape in slots.items():
                    found.append(Entry(table, slot, shape, dtype))
                if backend.read_step(table) is not None:
                    found.append(Entry(table, STEP, (), "int64"))
        return found

    def record(self, entry: Entry) -> dict[str, Any]:
        """What an index says of an entry; it holds the step counts."""
        record = entry.record()
        if entry.slot == STEP:
            with tf.init_scope():
                record["value"] = int(self.read(entry))
        return record

    def read(self, entry: Entry) -> tf.Tensor:
        """A whole entry."""
        backend = self._backend_of(entry.table)
        if entry.slot == STEP:
            step = backend.read_step(entry.table)
            return tf.cast(step, tf.int64)
        return backend.read_rows(entry.table, entry.slot, 0, entry.shape[0])

    def tensors(self) -> dict[str, tf.Tensor]:
        """All entries, under their names in a checkpoint.

        TensorFlow asks for them to restore a checkpoint too, and looks at
        names and dtypes alone. So there is an answer, of no use for saving,
        where the variables are not there yet.
        """
        return {
            entry.checkpoint_key: self.read(entry)
            if self._backend_of(entry.table).is_built
            else tf.zeros((), entry.dtype)
            for entry in self.entries()
        }

    def check_built(self) -> None:
        """Raises where the variables are not there yet.

        Raises:
            RuntimeError: there is nothing to save.
        """
        for backend in self._backends:
            backend.check_built()

    def read_blocks(self, entry: Entry) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (first row, values) of an entry with rows."""
        backend = self._backend_of(entry.table)
        for start in range(0, entry.shape[0], BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, entry.shape[0])
            rows = backend.read_rows(entry.table, entry.slot, start, stop)
            yield start, np.asarray(rows)

    def values_variable(self, table: str) -> tf.Variable | None:
        """The variable that holds a table's rows, if one device has them all.

        Of replicas that hold the same rows, the first one's.
        """
        return self._backend_of(table).values_variable(table)

    def write(self, entry: Entry, value: Any) -> None:
        """Overwrites a whole entry, block by block.

        Where the variables are not there yet, rows in a file are read once
        they are; anything else is copied.

        Args:
            entry: Which.
            value: An array, a tensor, a dataset of HDF5, or a `RowFile`.
        """
        backend = self._backend_of(entry.table)
        if entry.slot == STEP:
            backend.write_step(entry.table, value)
            return
        if not (backend.is_built or isinstance(value, RowFile)):
            value = np.array(value)

        def write() -> None:
            for start in range(0, entry.shape[0], BLOCK_ROWS):
                stop = min(start + BLOCK_ROWS, entry.shape[0])
                backend.write_rows(
                    entry.table,
                    entry.slot,
                    tf.range(start, stop),
                    value[start:stop],
                )

        backend.when_built(write)

    def write_rows(self, table: str, slot: str, ids: Any, values: Any) -> None:
        """Overwrites some rows of the values or of a slot."""
        self._backend_of(table).write_rows(table, slot, ids, values)

    def reset_rows(self, table: str, ids: Any | None = None) -> None:
        """Sets the slots of a table, or of some rows, to their first values.

        With all rows, the step count starts again from 0 too.
        """
        backend = self._backend_of(table)
        for slot, shape in backend.slot_shapes()[table].items():
            if slot == VALUES:
                continue
            first = backend.first_value(table, slot)
            every = (
                tf.range(shape[0]) if ids is None else tf.convert_to_tensor(ids)
            )
            for start in range(0, int(tf.size(every)), BLOCK_ROWS):
                some = every[start : start + BLOCK_ROWS]
                values = tf.fill([tf.size(some), shape[1]], first)
                backend.write_rows(table, slot, some, values)
        if ids is None and backend.read_step(table) is not None:
            backend.write_step(table, 0)

    def load(self, found: Mapping[str, Any], source: str) -> None:
        """Loads every entry from arrays by key, or none of them.

        Raises:
            ValueError: an entry is missing, has another shape, or belongs to
                no table or slot here; all of them are named.
        """
        entries = self.entries()
        check_entries(
            entries,
            {key: Found(tuple(value.shape)) for key, value in found.items()},
            source,
        )
        self.check_steps(
            {e.table: int(found[e.key]) for e in entries if e.slot == STEP}
        )
        for entry in entries:
            self.write(entry, found[entry.key])

    def check_steps(self, steps: Mapping[str, int]) -> None:
        """Raises for step counts that the tables cannot all have."""
        for backend in self._backends:
            here = backend.slot_shapes()
            backend.check_steps({k: n for k, n in steps.items() if k in here})

    def _backend_of(self, table: str) -> Backend:
        for backend in self._backends:
            if table in backend.slot_shapes():
                return backend
        raise KeyError(table)


class CheckpointIndex(tf.train.experimental.PythonState):
    """The list of entries that goes into a `tf.train.Checkpoint`.

    Of tensors, TensorFlow reads only those that an object asks for, and stops
    at the first that is missing; the rest it ignores. It reads Python state
    before any tensor: so this refuses a checkpoint that does not fit, with
    all that is wrong, before anything is restored.

    Args:
        state: The state that is saved and restored.
        layer: Name of the layer that has it.
    """

    def __init__(self, state: TableState, layer: str) -> None:
        self._state = state
        self._layer = layer

    def serialize(self) -> str:
        """The index as JSON; TensorFlow calls it to save."""
        self._state.check_built()
        return json.dumps(
            [self._state.record(e) for e in self._state.entries()]
        )

    def deserialize(self, string_value: str | bytes) -> None:
        """Compares the index of a checkpoint with what the layer has.

        Raises:
            ValueError: they differ, all differences are named; or the tables
                cannot all have their step counts.
        """
        records = json.loads(string_value)
        found = {
            f"{record['table']}:{record['slot']}": Found(
                tuple(record["shape"]), record["dtype"]
            )
            for record in records
        }
        check_entries(
            self._state.entries(),
            found,
            f"The checkpoint read by layer '{self._layer}'",
        )
        self._state.check_steps(
            {r["table"]: r["value"] for r in records if "value" in r}
        )


def keep_out_of_checkpoints(variable: keras.Variable) -> None:
    """Lets `tf.train.Checkpoint` write nothing for a Keras variable.

    The optimizer that trains a model keeps a list of all its variables, by
    which a checkpoint would have each table a second time, or a variable that
    is a backend's own. TensorFlow looks for this method on the object too.
    """
    variable._serialize_to_tensors = types.MethodType(
        _serialize_unless_checkpoint, variable
    )


def _serialize_unless_checkpoint(variable: keras.Variable) -> Mapping[str, Any]:
    """A SavedModel, which TensorFlow writes with the same methods, has all."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("save", "write") and isinstance(
            frame.f_locals.get("self"), tf.train.Checkpoint
        ):
            return {}
        frame = frame.f_back  # type: ignore[assignment]
    return type(variable)._serialize_to_tensors(variable)


def check_entries(
    entries: Sequence[Entry],
    found: Mapping[str, Found],
    source: str,
    cure: str = "",
) -> None:
    """Raises unless `found` has exactly these entries, as they are here.

    Raises:
        ValueError: with every entry that is missing, superfluous or of
            another shape or dtype.
    """
    expected = {entry.key: entry for entry in entries}
    problems = []
    for key, entry in expected.items():
        if key not in found:
            problems.append(f"'{key}' is missing")
            continue
        other = found[key]
        if tuple(other.shape) != entry.shape:
            problems.append(
                f"'{key}' has shape {other.shape}, expected {entry.shape}"
            )
        if other.dtype not in (None, entry.dtype):
            problems.append(
                f"'{key}' has dtype {other.dtype}, expected {entry.dtype}"
            )
    problems += [
        f"'{key}' belongs to no table or slot here"
        for key in found
        if key not in expected
    ]
    if problems:
        raise ValueError(
            f"{source} does not fit this layer, and nothing was loaded into "
            "it: "
            + "; ".join(problems)
            + ". Entries are named 'table:slot'; another optimizer has other "
            "slots." + (f" {cure}" if cure else "")
        )
