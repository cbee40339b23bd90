"""Tables on the SparseCores of a TPU, through `TPUEmbeddingV2`.

TensorFlow is given a flat list of features and its own names for the tables,
which lie where `sparsecore_layout` says. Their values are ours to set: the
same initial values as on any other device are written after it has made its
variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_distembed.backends.sparsecore_host import HostRules, StackLimits
from tf_distembed.backends.sparsecore_layout import (
    ALIGNMENT,
    TableLayout,
    Topology,
    lay_out,
)
from tf_distembed.backends.tpu_backend import TpuBackend
from tf_distembed.backends.tpu_batch import declared_width
from tf_distembed.backends.tpu_state import native_name
from tf_distembed.config import TableConfig
from tf_distembed.id_statistics import LimitStatistics
from tf_distembed.row_optimizers import write_rows

_native = tf.tpu.experimental.embedding


class _Embedding(tf.tpu.experimental.embedding.TPUEmbeddingV2):
    """`TPUEmbeddingV2` whose host block applies our rules first."""

    def __init__(self, rules: HostRules, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rules = rules

    def _preprocess_features(
        self,
        *args: Any,
        flat_inputs: Sequence[Any],
        flat_weights: Sequence[Any],
        **kwargs: Any,
    ) -> Any:
        ids, weights = self._rules(flat_inputs, flat_weights)
        return super()._preprocess_features(
            *args, flat_inputs=ids, flat_weights=weights, **kwargs
        )


class SparseCoreBackend(TpuBackend):
    """The tables of `placement="sparsecore"` on a TPU with SparseCores."""

    def _stacking(self, table_stacking: Any) -> Any:
        config = self._settings.sparse_core_embedding_config
        if config is not None and config.disable_table_stacking:
            return None
        return table_stacking

    def _prepare(self) -> None:
        hardware = self._strategy.extended.tpu_hardware_feature
        self.cores_per_chip = hardware.num_embedding_devices_per_chip or 4
        stacks = [one.stack.tables for one in self._stacks]
        self._layouts = lay_out(
            stacks, Topology(self._num_chips, self.cores_per_chip)
        )
        if self._settings.update_stats:
            self.limit_statistics = LimitStatistics(stacks)

    def _table_arguments(self, table: str) -> dict[str, Any]:
        layout = self._layouts[table]
        return {
            "name": layout.internal_name,
            "layout": layout.to_proto(),
            "initializer": _zeros,
        }

    def _host_rules(
        self,
        rows: int,
        positions: dict[str, int],
        widths: dict[str, int | None],
    ) -> HostRules:
        return HostRules(
            self.features,
            rows,
            positions,
            self.dropped,
            layouts=self._layouts,
            limits=self._limits(rows, positions, widths),
            statistics=self.limit_statistics,
            may_drop=self._allows_dropping,
        )

    def _make_embedding(self, rules: HostRules, features: list[Any]) -> Any:
        limits = rules.limits
        config = _native.SparseCoreEmbeddingConfig(
            max_ids_per_chip_per_sample=next(iter(limits.values())).per_sample,
            max_ids_per_table={k: v.max_ids for k, v in limits.items()},
            max_unique_ids_per_table={
                k: v.max_unique_ids for k, v in limits.items()
            },
            allow_id_dropping=self._allows_dropping,
            initialize_tables_on_host=False,
        )
        return _Embedding(
            rules,
            features,
            optimizer=None,
            pipeline_execution_with_tensor_core=(
                self._settings.pipeline_execution_with_tensor_core
            ),
            sparse_core_embedding_config=config,
        )

    @property
    def _allows_dropping(self) -> bool:
        config = self._settings.sparse_core_embedding_config
        return bool(config and config.allow_id_dropping)

    def _limits(
        self,
        rows: int,
        positions: dict[str, int],
        widths: dict[str, int | None],
    ) -> dict[str, StackLimits]:
        """Stack name -> its limits, the sums of those of its tables."""
        given = self._settings.sparse_core_embedding_config
        per_sample = 0
        if given is not None:
            _check_given(given, self._tables)
            default = type(given)().max_ids_per_chip_per_sample
            if given.max_ids_per_chip_per_sample != default:
                per_sample = given.max_ids_per_chip_per_sample
        samples = {
            one.stack: sum(rows * positions[f.name] for f in one.stack.features)
            for one in self._stacks
        }
        if not per_sample:
            per_sample = 64
            for stack, count in samples.items():
                ids = sum(
                    rows * (declared_width(f) or widths.get(f.name) or 0)
                    for f in stack.features
                )
                # Each partition of a chip's ids is padded to a multiple of 8.
                padding = 8 * self._num_chips * self.cores_per_chip
                padding *= self.cores_per_chip
                per_sample = max(per_sample, -(-(ids + padding) // count))
            # What a chip takes must be a multiple of it, whatever the samples.
            per_sample = -(-per_sample // ALIGNMENT) * ALIGNMENT
        limits = {}
        for stack, count in samples.items():
            names = tuple(table.name for table in stack.tables)
            limits[self._layouts[names[0]].stack_name] = StackLimits(
                tables=names,
                max_ids=sum(
                    _limit(given, "max_ids_per_table", t.name)
                    or t.max_ids_per_partition
                    for t in stack.tables
                ),
                max_unique_ids=sum(
                    _limit(given, "max_unique_ids_per_table", t.name)
                    or t.max_unique_ids_per_partition
                    for t in stack.tables
                ),
                max_ids_per_chip=per_sample * count,
                per_sample=per_sample,
            )
        return limits

    def _look_up(
        self, ids: list[Any], weights: list[Any] | None, training: bool
    ) -> tuple[Sequence[tf.Tensor], Any]:
        return self._embedding(ids, weights)

    def _apply(self, upstream: list[tf.Tensor], saved: Any) -> None:
        self._embedding.apply_gradients(upstream, saved)

    def _read(self, table: str, slot: str, ids: np.ndarray) -> np.ndarray:
        layout, parts = self._parts(table, slot)
        chips, positions = layout.locate(ids)
        dim = layout.table.embedding_dim
        rows = np.empty((len(ids), dim), np.float32)
        for chip, part in enumerate(parts):
            here = chips == chip
            if here.any():
                found = tf.gather(part, tf.constant(positions[here]))
                rows[here] = found.numpy()[:, :dim]
        return rows

    def _write(
        self, table: str, slot: str, ids: np.ndarray, values: np.ndarray
    ) -> None:
        layout, parts = self._parts(table, slot)
        chips, positions = layout.locate(ids)
        padding = layout.padded_dim - layout.table.embedding_dim
        rows = np.pad(values, [(0, 0), (0, padding)])
        for chip, part in enumerate(parts):
            here = chips == chip
            if here.any():
                where = tf.constant(positions[here])
                write_rows(part, where, tf.constant(rows[here]))

    def _parts(self, table: str, slot: str) -> tuple[TableLayout, Any]:
        layout = self._layouts[table]
        slots = self._embedding.variables[layout.stack_name]
        return layout, slots[native_name(slot)].values


def _zeros(
    shape: Any, dtype: tf.DType = tf.float32, shard_info: Any = None
) -> tf.Tensor:
    """What TensorFlow makes its variables with, before they are set."""
    return tf.zeros(shape if shard_info is None else shard_info.shape, dtype)


def _limit(config: Any, field: str, table: str) -> int | None:
    limits = getattr(config, field, None)
    return None if limits is None else limits.get(table)


def _check_given(config: Any, tables: dict[str, TableConfig]) -> None:
    for field in ("max_ids_per_table", "max_unique_ids_per_table"):
        unknown = set(getattr(config, field) or {}) - set(tables)
        if unknown:
            raise ValueError(
                f"sparse_core_embedding_config: {field} names tables that are "
                f"not placed on SparseCores: {sorted(unknown)}. The tables "
                f"there are {sorted(tables)}."
            )
    if config.enable_fast_table_initialization:
        raise ValueError(
            "sparse_core_embedding_config: enable_fast_table_initialization "
            "cannot be honoured: tables start from the same values on every "
            "device. Leave it out."
        )
