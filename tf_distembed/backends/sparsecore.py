"""Tables on the SparseCores of a TPU, through `TPUEmbeddingV2`.

TensorFlow is given a flat list of features and its own names for the tables,
which lie where `sparsecore_layout` says. Their values are ours to set: the
same initial values as on any other device are written after it has made its
variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from tf_distembed.backends.tpu_backend import TpuBackend, declared_width
from tf_distembed.backends.tpu_optimizers import (
    NATIVE_SLOTS,
    added_to_slot,
    frozen_optimizer,
    native_optimizer,
)
from tf_distembed.config import TableConfig
from tf_distembed.features import Feature
from tf_distembed.id_statistics import DroppedIds, LimitStatistics
from tf_distembed.row_optimizers import write_rows
from tf_distembed.tables import VALUES

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
    """The tables of `placement="sparsecore"` on a TPU with SparseCores.

    Args:
        features: Its features, in flat order.
        tables: Their tables, in order of configuration.
        optimizers: table name -> optimizer object in use, or None.
        table_stacking: As the layer's.
        settings: The layer's other arguments.
        dropped: Counts dropped ids, on the host.
        layer_name: What errors call the layer.
        dtype: Name of the tables' dtype; float32.

    Raises:
        ValueError: a table, optimizer or setting that SparseCores cannot
            have.
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
        self._config = settings.sparse_core_embedding_config
        if self._config is not None and self._config.disable_table_stacking:
            table_stacking = None
        super().__init__(
            features,
            tables,
            optimizers,
            table_stacking,
            settings,
            dropped,
            layer_name,
            dtype,
        )
        hardware = self._strategy.extended.tpu_hardware_feature
        self.cores_per_chip = hardware.num_embedding_devices_per_chip or 4
        self._layouts = lay_out(
            [state.stack.tables for state in self._stacks],
            Topology(self._num_chips, self.cores_per_chip),
        )
        if settings.update_stats:
            self.limit_statistics = LimitStatistics(
                [state.stack.tables for state in self._stacks]
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
        limits = self._limits(rows, positions, widths)
        allow_dropping = bool(self._config and self._config.allow_id_dropping)
        rules = HostRules(
            self.features,
            rows,
            positions,
            self.dropped,
            layouts=self._layouts,
            limits=limits,
            statistics=self.limit_statistics,
            raises=not allow_dropping,
        )
        config = _native.SparseCoreEmbeddingConfig(
            max_ids_per_chip_per_sample=next(iter(limits.values())).per_sample,
            max_ids_per_table={k: v.max_ids for k, v in limits.items()},
            max_unique_ids_per_table={
                k: v.max_unique_ids for k, v in limits.items()
            },
            allow_id_dropping=allow_dropping,
            initialize_tables_on_host=False,
        )

        def make() -> Any:
            embedding = _Embedding(
                rules,
                features,
                optimizer=None,
                pipeline_execution_with_tensor_core=self._pipelining,
                sparse_core_embedding_config=config,
            )
            embedding.build()
            return embedding

        return make

    def _native_tables(self) -> dict[str, Any]:
        tables = {}
        for state in self._stacks:
            optimizer = frozen_optimizer()
            if state.clock is not None:
                optimizer = native_optimizer(state.rule, state.clock)
            for table in state.stack.tables:
                layout = self._layouts[table.name]
                tables[table.name] = _native.TableConfig(
                    vocabulary_size=table.vocabulary_size,
                    dim=table.embedding_dim,
                    initializer=_zeros,
                    optimizer=optimizer,
                    combiner=table.combiner,
                    name=layout.internal_name,
                    layout=layout.to_proto(),
                )
        return tables

    def _limits(
        self,
        rows: int,
        positions: dict[str, int],
        widths: dict[str, int | None],
    ) -> dict[str, StackLimits]:
        """Stack name -> its limits, the sums of those of its tables."""
        given = self._config
        per_sample = 0
        if given is not None:
            _check_given(given, self._tables)
            default = type(given)().max_ids_per_chip_per_sample
            if given.max_ids_per_chip_per_sample != default:
                per_sample = given.max_ids_per_chip_per_sample
        samples = {
            state.stack: sum(
                rows * positions[f.name] for f in state.stack.features
            )
            for state in self._stacks
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
        self, ids: Sequence[Any], weights: Sequence[Any], training: bool
    ) -> tuple[list[tf.Tensor], Any]:
        given = list(weights) if any(w is not None for w in weights) else None
        activations, saved = self._embedding(list(ids), given)
        return list(activations), saved

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
        name = "parameters" if slot == VALUES else NATIVE_SLOTS[slot]
        return layout, slots[name].values

    def _added(self, table: str, slot: str) -> float:
        rule = self._state_of(table).rule
        return 0.0 if slot == VALUES else added_to_slot(rule, slot)


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
