"""One table of the default device: a small layer, so that Keras sees it."""

from __future__ import annotations

import os
from typing import Any

import keras
import tensorflow as tf

from tf_distembed.config import TableConfig
from tf_distembed.initial_values import InitialValues
from tf_distembed.row_optimizers import RowOptimizer, rule_of, write_rows
from tf_distembed.table_variable import TableVariable, components, fill_from

VALUES, STEP = "values", "step"


class EmbeddingTable(keras.layers.Layer):
    """A table's variable and, if it has its own optimizer, its slots.

    Args:
        config: The table.
        optimizer: The optimizer in use, an object, or None for a table that
            the model's optimizer trains.
        dtype: Name of the variable's dtype.

    Raises:
        ValueError: values and slots need more memory than the host has.
    """

    def __init__(self, config: TableConfig, optimizer: Any, dtype: str) -> None:
        super().__init__(name=config.name, dtype=dtype)
        where = f"Table '{config.name}'"
        shape = (config.vocabulary_size, config.embedding_dim)
        if not config.trainable:
            optimizer = None
        _check_memory(shape, dtype, optimizer, where)
        initial = InitialValues(config.initializer, shape, dtype, where)
        self.row_optimizer: RowOptimizer | None = None
        # Lifted out of any function being traced: tables are made once.
        with tf.init_scope(), keras.name_scope(config.name, caller=self):
            if optimizer is None:
                self.embeddings = _weight(initial, config.trainable)
            else:
                self.row_optimizer = RowOptimizer(optimizer, config.name)
                self.embeddings = TableVariable(
                    initial, self.row_optimizer, table_name=config.name
                )
                self.row_optimizer.make_slots(self.embeddings)
        self.built = True

    def rows(self, ids: tf.Tensor) -> tf.Tensor:
        """Reads rows: `[N]` ids -> `[N, embedding_dim]`."""
        return self._rows(ids, distinct=False)

    def distinct_rows(self, ids: tf.Tensor) -> tf.Tensor:
        """As `rows`, of ids of which no two are equal."""
        return self._rows(ids, distinct=True)

    def _rows(self, ids: tf.Tensor, distinct: bool) -> tf.Tensor:
        if isinstance(self.embeddings, TableVariable):
            return self.embeddings.rows(ids, distinct=distinct)
        value = self.embeddings.value
        if self.embeddings.trainable:
            return tf.gather(densely_trained(value), ids)
        return tf.gather(value, ids)

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        """Rows of ids of any shape `[...]` -> `[..., embedding_dim]`."""
        return self.rows(ids)

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """`(*input_shape, embedding_dim)`."""
        return (*input_shape, self.embeddings.shape[1])

    @property
    def slots(self) -> dict[str, keras.Variable]:
        """`"values"` and each slot -> its variable."""
        own = {} if self.row_optimizer is None else self.row_optimizer.slots
        return {VALUES: self.embeddings, **own}

    @property
    def step(self) -> keras.Variable | None:
        """The step count, or None for a table without its own optimizer."""
        if self.row_optimizer is None:
            return None
        return self.row_optimizer.iterations

    def read_rows(self, slot: str, start: int, stop: int) -> tf.Tensor:
        """Rows `start` to `stop` of the values or of a slot."""
        part = components(self.slots[slot].value)[0]
        if (start, stop) == (0, part.shape[0]):
            return tf.identity(part)
        return tf.gather(part, tf.range(start, stop))

    def write_rows(self, slot: str, ids: Any, values: Any) -> None:
        """Overwrites rows of the values or of a slot, on every device."""
        variable = self.slots[slot].value
        ids = tf.convert_to_tensor(ids)
        values = tf.cast(values, variable.dtype)
        for part in components(variable):
            write_rows(part, ids, values)

    def save_own_variables(self, store: Any) -> None:
        """Writes nothing: the layer writes tables by name."""

    def load_own_variables(self, store: Any) -> None:
        """Reads nothing: the layer reads tables by name."""


def _weight(initial: InitialValues, trainable: bool) -> keras.Variable:
    variable = keras.Variable(
        lambda shape, dtype: tf.zeros(shape, dtype),
        shape=initial.shape,
        dtype=initial.dtype,
        trainable=trainable,
        autocast=False,
        name="embeddings",
    )
    fill_from(variable, initial)
    return variable


def densely_trained(table: Any) -> tf.Tensor:
    """The whole of a variable or tensor, whose gradient arrives dense.

    Keras' optimizers do not sum the repeated ids of a sparse gradient, which
    two uses or two replicas bring; a dense one has nothing to sum.
    """

    @tf.custom_gradient
    def identity(values: tf.Tensor) -> Any:
        return tf.identity(values), tf.convert_to_tensor

    return identity(tf.convert_to_tensor(table))


def _check_memory(
    shape: tuple[int, int], dtype: str, optimizer: Any, where: str
) -> None:
    slots = 0 if optimizer is None else len(rule_of(optimizer, where).slots)
    each = shape[0] * shape[1] * tf.as_dtype(dtype).size
    needed = each * (1 + slots)
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return  # a system that does not tell
    if needed > total:
        raise ValueError(
            f"{where}: {shape[0]:,} rows of {shape[1]:,} values need "
            f"{each / 2**30:,.1f} GiB, with {slots} slots of its optimizer "
            f"{needed / 2**30:,.1f} GiB, and this machine has "
            f"{total / 2**30:,.1f} GiB. Use fewer rows, an optimizer with "
            "fewer slots, or a placement with more memory."
        )
