"""Tables on the embedding hardware of older TPUs, through `TPUEmbedding`.

TPU v2 to v4 have no SparseCores that `TPUEmbeddingV2` drives; their tables
live in the memory of all chips, in whole rows, and there is no stacking. The
rules on ids and weights are applied on the host as for SparseCores. This has
never run on a TPU; what can be tested without one is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_distembed.backends.sparsecore_host import HostRules
from tf_distembed.backends.tpu_backend import TpuBackend
from tf_distembed.backends.tpu_state import native_name


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
    """The tables of `placement="sparsecore"` on a TPU without SparseCores."""

    def _stacking(self, table_stacking: Any) -> Any:
        if table_stacking not in ("auto", None):
            raise ValueError(
                f"Layer '{self._layer_name}': this TPU has no SparseCores, and "
                "tables cannot be stacked on it. Use table_stacking='auto' or "
                f"None. Received: {table_stacking!r}"
            )
        for field in ("update_stats", "sparse_core_embedding_config"):
            if value := getattr(self._settings, field):
                raise ValueError(
                    f"Layer '{self._layer_name}': this TPU has no "
                    f"SparseCores, which {field}={value!r} is about. Leave it "
                    "out."
                )
        return None

    def _prepare(self) -> None:
        names = [
            table.name for one in self._stacks for table in one.stack.tables
        ]
        self._internal_names = {
            name: f"table{i:06d}" for i, name in enumerate(names)
        }

    def _table_arguments(self, table: str) -> dict[str, Any]:
        return {
            "name": self._internal_names[table],
            "initializer": tf.zeros_initializer(),
        }

    def _host_rules(
        self,
        rows: int,
        positions: dict[str, int],
        widths: dict[str, int | None],
    ) -> HostRules:
        return HostRules(self.features, rows, positions, self.dropped)

    def _make_embedding(self, rules: HostRules, features: list[Any]) -> Any:
        return _Embedding(
            rules,
            features,
            optimizer=None,
            pipeline_execution_with_tensor_core=(
                self._settings.pipeline_execution_with_tensor_core
            ),
        )

    def _look_up(
        self, ids: list[Any], weights: list[Any] | None, training: bool
    ) -> tuple[Sequence[tf.Tensor], Any]:
        self._embedding.enqueue(ids, weights, training=training)
        return self._embedding.dequeue(), None

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
        name = self._internal_names[table]
        variable = self._embedding._variables[name][native_name(slot)]
        return list(getattr(variable, "variables", [variable]))
