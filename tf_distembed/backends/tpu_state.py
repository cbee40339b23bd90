"""The state of tables on a TPU, in the terms of every other backend.

TensorFlow's object holds the variables, of which it may have none yet: they
are made for a static batch. What is written before is kept until then.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_distembed.backends import base, tpu_optimizers
from tf_distembed.backends.tpu_stacks import TpuStack, check_steps
from tf_distembed.config import TableConfig
from tf_distembed.initial_values import InitialValues
from tf_distembed.tables import VALUES


class TpuState(base.Backend):
    """Values, slots and step counts of tables on a TPU.

    Args:
        tables: In order of configuration.
        stacks: The stacks that they form.
        layer_name: What errors call the layer.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        stacks: Sequence[TpuStack],
        layer_name: str,
    ) -> None:
        self._tables = {table.name: table for table in tables}
        self._stacks = stacks
        self._layer_name = layer_name
        self._embedding: Any = None
        self._pending: list[Callable[[], None]] = []

    @abc.abstractmethod
    def _read(self, table: str, slot: str, ids: np.ndarray) -> np.ndarray:
        """Rows of TensorFlow's own variable, `[N, embedding_dim]`."""

    @abc.abstractmethod
    def _write(
        self, table: str, slot: str, ids: np.ndarray, values: np.ndarray
    ) -> None:
        """Overwrites rows of TensorFlow's own variable."""

    @property
    def is_built(self) -> bool:
        return self._embedding is not None

    def check_built(self) -> None:
        if not self.is_built:
            raise RuntimeError(
                f"Layer '{self._layer_name}' has no variables yet: declare the "
                "global batch as the first entry of input_shape or "
                "output_shape, or call the layer once."
            )

    def when_built(self, write: Callable[[], None]) -> None:
        if self.is_built:
            write()
        else:
            self._pending.append(write)

    def set_values(self) -> None:
        """Sets the initial values, then what was written before."""
        for name, table in self._tables.items():
            shape = (table.vocabulary_size, table.embedding_dim)
            initial = InitialValues(
                table.initializer, shape, "float32", f"Table '{name}'"
            )
            for start, values in initial.blocks():
                ids = np.arange(start, start + len(values))
                self.write_rows(name, VALUES, ids, values)
        pending, self._pending = self._pending, []
        for write in pending:
            write()

    def slot_shapes(self) -> dict[str, dict[str, tuple[int, int]]]:
        shapes = {}
        for name, table in self._tables.items():
            one = self._stack_of(name)
            slots = (VALUES,)
            if one.clock is not None:
                slots += tuple(one.rule.slots)
            shape = (table.vocabulary_size, table.embedding_dim)
            shapes[name] = dict.fromkeys(slots, shape)
        return shapes

    def slot_dtype(self, table: str) -> str:
        return "float32"

    def read_rows(
        self, table: str, slot: str, start: int, stop: int
    ) -> tf.Tensor:
        self._check_place_of_state()
        self.check_built()
        rows = self._read(table, slot, np.arange(start, stop))
        return tf.constant(rows - np.float32(self._added(table, slot)))

    def write_rows(self, table: str, slot: str, ids: Any, values: Any) -> None:
        self._check_place_of_state()
        if not self.is_built:
            kept = np.array(ids), np.array(values, np.float32)
            self.when_built(lambda: self.write_rows(table, slot, *kept))
            return
        rows = np.asarray(values, np.float32)
        rows = rows + np.float32(self._added(table, slot))
        self._write(table, slot, np.asarray(ids), rows)

    def first_value(self, table: str, slot: str) -> float:
        return self._stack_of(table).rule.slots[slot]

    def read_step(self, table: str) -> tf.Tensor | None:
        clock = self._stack_of(table).clock
        return None if clock is None else tf.convert_to_tensor(clock.iterations)

    def write_step(self, table: str, step: Any) -> None:
        clock = self._stack_of(table).clock
        if clock is not None:
            clock.iterations.assign(tf.cast(step, clock.iterations.dtype))

    def check_steps(self, steps: dict[str, int]) -> None:
        check_steps(self._stacks, steps)

    def _check_place_of_state(self) -> None:
        if tf.inside_function():
            raise RuntimeError(
                f"Layer '{self._layer_name}' has tables with placement "
                "'sparsecore', which are read and written between steps, "
                "outside of strategy.run and tf.function."
            )

    def _added(self, table: str, slot: str) -> float:
        """What TensorFlow's slot holds beyond Keras' slot."""
        if slot == VALUES:
            return 0.0
        return tpu_optimizers.added_to_slot(self._stack_of(table).rule, slot)

    def _stack_of(self, table: str) -> TpuStack:
        for one in self._stacks:
            if any(member.name == table for member in one.stack.tables):
                return one
        raise KeyError(table)


def native_name(slot: str) -> str:
    """TensorFlow's name of a table's values or of a slot."""
    return "parameters" if slot == VALUES else tpu_optimizers.NATIVE_SLOTS[slot]
