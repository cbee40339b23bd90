"""Tables on the default device: CPU, GPU, or a TPU's TensorCore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_distembed import row_optimizers
from tf_distembed.backends import base
from tf_distembed.backends.stack_lookup import StackLookup
from tf_distembed.config import TableConfig
from tf_distembed.features import Feature
from tf_distembed.id_statistics import DroppedIds
from tf_distembed.inputs import DENSE, kind_of
from tf_distembed.stacking import make_stacks
from tf_distembed.table_variable import components
from tf_distembed.tables import VALUES, EmbeddingTable


class DefaultDeviceBackend(base.Backend):
    """The tables of `placement="default_device"`.

    Args:
        features: Its features, in flat order.
        tables: Their tables, in order of configuration.
        optimizers: table name -> optimizer object in use, or None.
        table_stacking: As the layer's.
        dtype: Name of the tables' dtype.
        dropped: Counts dropped ids.
    """

    placement = "default_device"

    def __init__(
        self,
        features: Sequence[Feature],
        tables: Sequence[TableConfig],
        optimizers: dict[str, Any],
        table_stacking: Any,
        dtype: str,
        dropped: DroppedIds,
    ) -> None:
        self.features = features
        self.dropped = dropped
        keys = {
            table.name: {
                "embedding_dim": table.embedding_dim,
                "optimizer": row_optimizers.stack_key(
                    table, optimizers[table.name]
                ),
            }
            for table in tables
        }
        stacks = make_stacks(tables, features, table_stacking, keys)
        self.tables = {
            table.name: EmbeddingTable(table, optimizers[table.name], dtype)
            for table in tables
        }
        self._lookup = StackLookup(
            features,
            stacks,
            {name: table.rows for name, table in self.tables.items()},
            dropped,
            {name: table.distinct_rows for name, table in self.tables.items()},
        )
        self.optimizers = {
            name: table.row_optimizer.in_use()
            for name, table in self.tables.items()
            if table.row_optimizer is not None
        }

    def lookup(
        self,
        ids: Sequence[Any],
        weights: Sequence[Any],
        training: bool,
    ) -> list[tf.Tensor]:
        if isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy):
            for feature, one in zip(self.features, ids, strict=True):
                if (kind := kind_of(one)) != DENSE:
                    raise ValueError(
                        f"{feature.where}: on a TPU, a table with placement "
                        f"'default_device' ('{feature.table.name}') takes "
                        f"dense ids only. Received: {kind} ids. Place the "
                        "table on 'sparsecore', or pad the ids and use "
                        "invalid_ids='drop'."
                    )
        return self._lookup(ids, weights, unique=training)

    def keras_parts(self) -> dict[str, Any]:
        return dict(self.tables)

    def slot_shapes(self) -> dict[str, dict[str, tuple[int, int]]]:
        return {
            name: {
                slot: tuple(variable.shape)
                for slot, variable in table.slots.items()
            }
            for name, table in self.tables.items()
        }

    def slot_dtype(self, table: str) -> str:
        return self.tables[table].embeddings.dtype

    def values_variable(self, table: str) -> tf.Variable | None:
        return components(self.tables[table].embeddings.value)[0]

    def read_rows(
        self, table: str, slot: str, start: int, stop: int
    ) -> tf.Tensor:
        return self.tables[table].read_rows(slot, start, stop)

    def write_rows(self, table: str, slot: str, ids: Any, values: Any) -> None:
        self.tables[table].write_rows(slot, ids, values)

    def first_value(self, table: str, slot: str) -> float:
        row_optimizer = self.tables[table].row_optimizer
        if row_optimizer is None or slot == VALUES:
            raise KeyError(slot)
        return row_optimizer.rule.slots[slot]

    def read_step(self, table: str) -> tf.Tensor | None:
        step = self.tables[table].step
        return None if step is None else tf.convert_to_tensor(step.value)

    def write_step(self, table: str, step: Any) -> None:
        variable = self.tables[table].step
        if variable is not None:
            variable.value.assign(tf.cast(step, variable.dtype))
