"""Tables on the embedding hardware of older TPUs, through `TPUEmbedding`.

TPU v2 to v4 have no SparseCores that `TPUEmbeddingV2` drives; their tables
live in the memory of all chips, in whole rows, and there is no stacking. The
rules on ids and weights are applied on the host as for SparseCores. This has
never run on a TPU; what can be tested without one is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_distembed.backends.sparsecore_host import HostRules
from tf_distembed.backends.tpu_backend import TpuBackend
from tf_distembed.backends.tpu_optimizers import (
    NATIVE_SLOTS,
    added_to_slot,
    frozen_optimizer,
    native_optimizer,
)
from tf_distembed.config import TableConfig
from tf_distembed.features import Feature
from tf_distembed.id_statistics import DroppedIds
from tf_distembed.tables import VALUES

_native = tf.tpu.experimental.embedding


class _Embedding(tf.tpu.experimental.embedding.TPUEmbedding):
    """`TPUEmbedding` whose host block applies our rules first."""

    def __init__(self, rules: HostRules, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rules = rules

    def _generate_enqueue_op(
        self, flat_inputs: Any, flat_weights: Any, *args: Any
    ) -> Any:
        ids, weights = self._rules(flat_inputs, flat_weights)
        return super()._generate_enqueue_op(ids, weights, *args)


class TpuEmbeddingV1Backend(TpuBackend):
    """The tables of `placement="sparsecore"` on a TPU without SparseCores.

    Args:
        features: Its features, in flat order.
        tables: Their tables, in order of configuration.
        optimizers: table name -> optimizer object in use, or None.
        table_stacking: As the layer's; `"auto"` and None are the same here.
        settings: The layer's other arguments.
        dropped: Counts dropped ids, on the host.
        layer_name: What errors call the layer.
        dtype: Name of the tables' dtype; float32.

    Raises:
        ValueError: stacking lists, or a table, optimizer or setting that this
            hardware cannot have.
    """

    def __init__(
        self,
        features: Sequence[Feature],
        tables: Sequence[TableConfig],
        optimizers: dict[str, Any],
        table_stacking: Any,
        settings: Any,
        dropped: DroppedIds,
        layer_name: str,
        dtype: str,
    ) -> None:
        if table_stacking not in ("auto", None):
            raise ValueError(
                f"Layer '{layer_name}': this TPU has no SparseCores, and "
                "tables cannot be stacked on it. Use table_stacking='auto' or "
                f"None. Received: {table_stacking!r}"
            )
        for field in ("update_stats", "sparse_core_embedding_config"):
            if value := getattr(settings, field):
                raise ValueError(
                    f"Layer '{layer_name}': this TPU has no SparseCores, "
                    f"which {field}={value!r} is about. Leave it out."
                )
        super().__init__(
            features,
            tables,
            optimizers,
            None,
            settings,
            dropped,
            layer_name,
            dtype,
        )
        batch = self.declared_batch()
        if batch is not None:
            self.build(batch, {})

    def _make_embedding(
        self,
        rows: int,
        positions: dict[str, int],
        widths: dict[str, int | None],
    ) -> Callable[[], Any]:
        natives = self._native_tables()
        features = [
            _native.FeatureConfig(
                table=natives[feature.table.name],
                name=f"feature{i:06d}",
                output_shape=[rows]
                if feature.is_combined
                else [rows, positions[feature.name]],
            )
            for i, feature in enumerate(self.features)
        ]
        rules = HostRules(
            self.features,
            rows,
            positions,
            self.dropped,
            layouts={},
            limits={},
            statistics=None,
            raises=False,
        )

        def make() -> Any:
            embedding = _Embedding(
                rules,
                features,
                optimizer=None,
                pipeline_execution_with_tensor_core=self._pipelining,
            )
            embedding.build()
            return embedding

        return make

    def _native_tables(self) -> dict[str, Any]:
        tables = {}
        for number, state in enumerate(self._stacks):
            (table,) = state.stack.tables
            optimizer = frozen_optimizer()
            if state.clock is not None:
                optimizer = native_optimizer(state.rule, state.clock)
            tables[table.name] = _native.TableConfig(
                vocabulary_size=table.vocabulary_size,
                dim=table.embedding_dim,
                initializer=tf.zeros_initializer(),
                optimizer=optimizer,
                combiner=table.combiner,
                name=f"table{number:06d}",
            )
        return tables

    def _look_up(
        self, ids: Sequence[Any], weights: Sequence[Any], training: bool
    ) -> tuple[list[tf.Tensor], Any]:
        given = list(weights) if any(w is not None for w in weights) else None
        self._embedding.enqueue(list(ids), given, training=training)
        return list(self._embedding.dequeue()), None

    def _apply(self, upstream: list[tf.Tensor], saved: Any) -> None:
        self._embedding.apply_gradients(upstream)

    def _read(self, table: str, slot: str, ids: np.ndarray) -> np.ndarray:
        parts = self._parts(table, slot)
        self._embedding._retrieve_variables()
        return np.concatenate([part.numpy() for part in parts])[ids]

    def _write(
        self, table: str, slot: str, ids: np.ndarray, values: np.ndarray
    ) -> None:
        self._embedding._retrieve_variables()
        start = 0
        for part in self._parts(table, slot):
            stop = start + part.shape[0]
            here = (ids >= start) & (ids < stop)
            rows = part.numpy()
            rows[ids[here] - start] = values[here]
            part.assign(rows)
            start = stop
        self._embedding._load_variables()

    def _parts(self, table: str, slot: str) -> list[Any]:
        """The variables that hold a table's rows, one a host, in order."""
        number = list(self._tables).index(table)
        slots = self._embedding._variables[f"table{number:06d}"]
        name = "parameters" if slot == VALUES else NATIVE_SLOTS[slot]
        variable = slots[name]
        return list(getattr(variable, "variables", [variable]))

    def _added(self, table: str, slot: str) -> float:
        rule = self._state_of(table).rule
        return 0.0 if slot == VALUES else added_to_slot(rule, slot)
