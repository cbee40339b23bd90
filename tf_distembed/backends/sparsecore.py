"""Tables on the SparseCores of a TPU, through `TPUEmbeddingV2`.

TensorFlow is given a flat list of features and its own names for the tables,
which lie where `sparsecore_layout` says. Their values are ours to set: the
same initial values as on any other device are written after it has made its
variables.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_distembed import row_optimizers
from tf_distembed.backends import base, private_tensorflow
from tf_distembed.backends.gradient_trap import GradientTrap
from tf_distembed.backends.sparsecore_host import HostRules, StackLimits
from tf_distembed.backends.sparsecore_layout import (
    ALIGNMENT,
    TableLayout,
    Topology,
    lay_out,
)
from tf_distembed.backends.sparsecore_optimizers import (
    NATIVE_SLOTS,
    added_to_slot,
    check_rule,
    frozen_optimizer,
    native_optimizer,
)
from tf_distembed.config import TableConfig
from tf_distembed.features import Feature
from tf_distembed.id_statistics import DroppedIds, LimitStatistics
from tf_distembed.initial_values import InitialValues
from tf_distembed.row_optimizers import RowOptimizer, write_rows
from tf_distembed.stacking import Stack, make_stacks
from tf_distembed.tables import VALUES

_native = tf.tpu.experimental.embedding

_PATTERN = """
    @tf.function
    def train_step(iterator):
        def step(inputs):
            with tf.GradientTape() as tape:
                loss = ...layer(inputs)...
            tape.gradient(loss, layer.trainable_variables)
        strategy.run(step, args=(next(iterator),))
"""


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


@dataclasses.dataclass
class _StackState:
    """One stack: its tables and, if it is trained, rule and clock."""

    stack: Stack
    rule: Any
    clock: RowOptimizer | None


class SparseCoreBackend(base.Backend):
    """The tables of `placement="sparsecore"`.

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

    placement = "sparsecore"

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
        if dtype != "float32":
            raise ValueError(
                f"Layer '{layer_name}': tables with placement 'sparsecore' are "
                f"float32. Received: variable dtype {dtype}. Use a mixed "
                "policy, such as mixed_bfloat16, for other outputs."
            )
        self.features = features
        self._strategy = tf.distribute.get_strategy()
        hardware = self._strategy.extended.tpu_hardware_feature
        self._topology = Topology(
            self._strategy.num_replicas_in_sync,
            hardware.num_embedding_devices_per_chip or 4,
        )
        self._config = settings.sparse_core_embedding_config
        self._pipelining = settings.pipeline_execution_with_tensor_core
        self.dropped = dropped
        self._layer_name = layer_name
        if self._config is not None and self._config.disable_table_stacking:
            table_stacking = None
        own = {t.name: _own_optimizer(t, optimizers[t.name]) for t in tables}
        keys = {
            table.name: {
                "embedding_dim": table.embedding_dim,
                "optimizer": row_optimizers.stack_key(table, own[table.name]),
            }
            for table in tables
        }
        stacks = make_stacks(tables, features, table_stacking, keys)
        self._layouts = lay_out([s.tables for s in stacks], self._topology)
        self._stacks = [self._stack_state(s, own) for s in stacks]
        self.optimizers = {
            table.name: state.clock.in_use()
            for state in self._stacks
            if state.clock is not None
            for table in state.stack.tables
        }
        self.limit_statistics = (
            LimitStatistics([state.stack.tables for state in self._stacks])
            if settings.update_stats
            else None
        )
        self.trap = GradientTrap(layer_name, bool(self.optimizers))
        self._tables = {table.name: table for table in tables}
        self._rows: int | None = None
        # What was restored before the variables were there.
        self._pending: list[tuple[str, str, Any, Any]] = []
        self._embedding: Any = None
        self._updated: weakref.WeakSet[Any] = weakref.WeakSet()
        batch = self.declared_batch()
        if batch is not None:
            self.build(batch, {})

    def _stack_state(self, stack: Stack, own: dict[str, Any]) -> _StackState:
        first = stack.tables[0]
        optimizer = own[first.name]
        if optimizer is None:
            return _StackState(stack, None, None)
        where = f"Table '{first.name}'"
        rule = row_optimizers.rule_of(optimizer, where)
        check_rule(rule, where)
        optimizer = _made_here(optimizer)
        clock = RowOptimizer(optimizer, self._layouts[first.name].stack_name)
        return _StackState(stack, rule, clock)

    # -- the static batch ---------------------------------------------------

    def declared_batch(self) -> int | None:
        """The global batch size, if the features declare it.

        Raises:
            ValueError: features declare different ones.
        """
        declared = {}
        for feature in self.features:
            for shape in (feature.output_shape, feature.input_shape):
                if shape is not None and shape[0] is not None:
                    declared[feature.name] = shape[0]
        if len(set(declared.values())) > 1:
            raise ValueError(
                "Features with placement 'sparsecore' must declare one global "
                f"batch size. Received: {declared}"
            )
        return next(iter(declared.values()), None)

    @property
    def is_built(self) -> bool:
        """Whether the variables are there."""
        return self._embedding is not None

    def build(self, global_batch: int, widths: dict[str, int | None]) -> None:
        """Makes the variables for a static batch.

        Args:
            global_batch: Examples of all replicas.
            widths: feature name -> ids of an example, where the kind of input
                fixes it.

        Raises:
            ValueError: the batch cannot be divided over the SparseCores, or
                the positions of a feature are unknown.
        """
        chips = self._topology.num_chips
        cores = self._topology.sparsecores_per_chip
        if global_batch % (chips * cores):
            raise ValueError(
                f"Layer '{self._layer_name}': placement 'sparsecore' divides "
                f"the global batch over {chips} replicas and each replica's "
                f"part over {cores} SparseCores, so it must be a multiple of "
                f"{chips * cores}. Received: a global batch of {global_batch}."
            )
        rows = global_batch // chips
        positions = {
            f.name: _positions(f, widths.get(f.name)) for f in self.features
        }
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
            self._layouts,
            rows,
            positions,
            limits,
            self.dropped,
            self.limit_statistics,
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

        def make() -> None:
            with self._strategy.scope():
                self._embedding = _Embedding(
                    rules,
                    features,
                    optimizer=None,
                    pipeline_execution_with_tensor_core=self._pipelining,
                    sparse_core_embedding_config=config,
                )
                self._embedding.build()
                self._rows = rows
                for name in self._tables:
                    self._set_initial(name)
                pending, self._pending = self._pending, []
                for change in pending:
                    self.write_rows(*change)

        _outside_of_tracing(make)

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
                    rows * (_declared_width(f) or widths.get(f.name) or 0)
                    for f in stack.features
                )
                # Each partition of a chip's ids is padded to a multiple of 8.
                padding = 8 * self._topology.num_shards
                padding *= self._topology.sparsecores_per_chip
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

    def _set_initial(self, name: str) -> None:
        table = self._tables[name]
        shape = (table.vocabulary_size, table.embedding_dim)
        initial = InitialValues(
            table.initializer, shape, "float32", f"Table '{name}'"
        )
        for start, values in initial.blocks():
            ids = np.arange(start, start + len(values))
            self.write_rows(name, VALUES, ids, values)

    # -- lookup and update --------------------------------------------------

    def lookup(
        self, ids: Sequence[Any], weights: Sequence[Any], training: bool
    ) -> list[tf.Tensor]:
        self._check_place()
        rows = self._build_for(ids)
        for feature, weight in zip(self.features, weights, strict=True):
            _refuse_learned(feature, weight)
        given = list(weights) if any(w is not None for w in weights) else None
        context = tf.distribute.get_replica_context()

        @tf.custom_gradient
        def looked_up(trap: tf.Tensor) -> Any:
            activations, preserved = self._embedding(list(ids), given)

            def gradient(*upstream: tf.Tensor) -> tf.Tensor:
                self._update(upstream, preserved, context)
                return tf.zeros_like(trap)

            return list(activations), gradient

        found = looked_up(tf.convert_to_tensor(self.trap.value))
        return [
            one if n is None else one[:n]
            for one, n in zip(found, rows, strict=True)
        ]

    def _update(
        self,
        upstream: Sequence[tf.Tensor],
        preserved: Any,
        context: tf.distribute.ReplicaContext,
    ) -> None:
        if context in self._updated:
            raise ValueError(
                f"Layer '{self._layer_name}' was called twice in one training "
                "step. Tables with placement 'sparsecore' are updated when "
                "the gradient of a call is computed, so the second call's "
                "gradient would be a second step. Make both inputs features "
                "of one layer."
            )
        self._updated.add(context)
        self._embedding.apply_gradients(list(upstream), preserved)
        for state in self._stacks:
            if state.clock is not None:
                state.clock.count_step()

    def _check_place(self) -> None:
        context = tf.distribute.get_replica_context()
        if (
            context is None
            or context.strategy is not self._strategy
            or tf.executing_eagerly()
        ):
            raise RuntimeError(
                f"Layer '{self._layer_name}' has tables with placement "
                "'sparsecore' and must be called inside strategy.run, in a "
                "tf.function, with the strategy in whose scope it was made. "
                f"The pattern is:\n{_PATTERN}\nmodel.fit, evaluate and "
                "predict do this."
            )

    def _build_for(self, ids: Sequence[Any]) -> list[int | None]:
        """Builds at the first call; the rows to cut each output back to."""
        static = [one.shape[0] for one in ids]
        if not self.is_built:
            batch = self.declared_batch()
            known = [rows for rows in static if rows is not None]
            if batch is None and known:
                batch = max(known) * self._topology.num_chips
            if batch is None:
                raise ValueError(
                    f"Layer '{self._layer_name}': placement 'sparsecore' "
                    "needs a static batch. Declare the global batch as the "
                    "first entry of input_shape or output_shape, or feed "
                    "batches of a known size (drop_remainder=True)."
                )
            self.build(batch, self._widths(ids))
        rows = self._rows
        assert rows is not None
        for feature, found in zip(self.features, static, strict=True):
            if found is not None and found > rows:
                whole = rows * self._topology.num_chips
                hint = (
                    " That is the global batch; strategy.run takes a "
                    "replica's part of it."
                    if found == whole and found != rows
                    else ""
                )
                raise ValueError(
                    f"{feature.where}: a replica's batch has at most {rows} "
                    f"examples (a global batch of {whole} over "
                    f"{self._topology.num_chips} replicas). Received: {found} "
                    f"examples.{hint}"
                )
        return [None if found == rows else found for found in static]

    def _widths(self, ids: Sequence[Any]) -> dict[str, int | None]:
        widths: dict[str, int | None] = {}
        for feature, one in zip(self.features, ids, strict=True):
            if isinstance(one, tf.Tensor):
                widths[feature.name] = (
                    one.shape[1] if one.shape.rank == 2 else 1
                )
        return widths

    def keras_parts(self) -> dict[str, Any]:
        # No table has this name: names of tables have no "/".
        return {"/gradient_trap": self.trap}

    # -- state --------------------------------------------------------------

    def slot_shapes(self) -> dict[str, dict[str, tuple[int, int]]]:
        shapes = {}
        for name, table in self._tables.items():
            state = self._state_of(name)
            slots = (VALUES,)
            if state.clock is not None:
                slots += tuple(state.rule.slots)
            shape = (table.vocabulary_size, table.embedding_dim)
            shapes[name] = dict.fromkeys(slots, shape)
        return shapes

    def slot_dtype(self, table: str) -> str:
        return "float32"

    def read_rows(
        self, table: str, slot: str, start: int, stop: int
    ) -> tf.Tensor:
        layout, parts = self._parts(table, slot)
        chips, positions = layout.locate(np.arange(start, stop))
        dim = layout.table.embedding_dim
        rows = np.empty((stop - start, dim), np.float32)
        for chip, part in enumerate(parts):
            here = chips == chip
            if here.any():
                found = tf.gather(part, tf.constant(positions[here]))
                rows[here] = found.numpy()[:, :dim]
        return tf.constant(rows - self._added(table, slot))

    def write_rows(self, table: str, slot: str, ids: Any, values: Any) -> None:
        if not self.is_built:
            kept = np.array(ids), np.array(values, np.float32)
            self._pending.append((table, slot, *kept))
            return
        layout, parts = self._parts(table, slot)
        chips, positions = layout.locate(np.asarray(ids))
        dim = layout.table.embedding_dim
        rows = np.asarray(values, np.float32) + self._added(table, slot)
        rows = np.pad(rows, [(0, 0), (0, layout.padded_dim - dim)])
        for chip, part in enumerate(parts):
            here = chips == chip
            if here.any():
                write_rows(
                    part, tf.constant(positions[here]), tf.constant(rows[here])
                )

    def first_value(self, table: str, slot: str) -> float:
        return self._state_of(table).rule.slots[slot]

    def read_step(self, table: str) -> tf.Tensor | None:
        clock = self._state_of(table).clock
        return None if clock is None else tf.convert_to_tensor(clock.iterations)

    def write_step(self, table: str, step: Any) -> None:
        clock = self._state_of(table).clock
        if clock is not None:
            clock.iterations.assign(tf.cast(step, clock.iterations.dtype))

    def check_steps(self, steps: dict[str, int]) -> None:
        """Raises for step counts that tables of one stack cannot all have."""
        for state in self._stacks:
            if state.clock is None:
                continue
            wanted = {
                t.name: int(steps.get(t.name, state.clock.iterations.numpy()))
                for t in state.stack.tables
            }
            if len(set(wanted.values())) > 1:
                raise ValueError(
                    "Tables of one stack have one step count on SparseCores, "
                    f"and these would have different ones: {wanted}. Keep them "
                    "apart with table_stacking, or load all of them from one "
                    "state."
                )

    def _state_of(self, table: str) -> _StackState:
        for state in self._stacks:
            if any(one.name == table for one in state.stack.tables):
                return state
        raise KeyError(table)

    def _added(self, table: str, slot: str) -> np.float32:
        rule = self._state_of(table).rule
        return np.float32(0.0 if slot == VALUES else added_to_slot(rule, slot))

    def _parts(self, table: str, slot: str) -> tuple[TableLayout, Any]:
        if not self.is_built:
            raise RuntimeError(
                f"Layer '{self._layer_name}' has no variables yet: declare the "
                "global batch as the first entry of input_shape or "
                "output_shape, or call the layer once."
            )
        layout = self._layouts[table]
        slots = self._embedding.variables[layout.stack_name]
        name = "parameters" if slot == VALUES else NATIVE_SLOTS[slot]
        return layout, slots[name].values


def _outside_of_tracing(function: Callable[[], None]) -> None:
    """Calls a function as if no replica were being traced.

    `tf.init_scope` leaves the graph, but not the replica; a new thread has
    neither.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as threads:
        threads.submit(function).result()


def _zeros(
    shape: Any, dtype: tf.DType = tf.float32, shard_info: Any = None
) -> tf.Tensor:
    """What TensorFlow makes its variables with, before they are set."""
    return tf.zeros(shape if shard_info is None else shard_info.shape, dtype)


def _own_optimizer(table: TableConfig, optimizer: Any) -> Any:
    if not table.trainable:
        return None
    if optimizer is None:
        raise ValueError(
            f"Table '{table.name}': placement 'sparsecore' needs a table's "
            "own optimizer; the model's cannot train it. Set optimizer= of "
            "the table or of the layer, or placement='default_device'."
        )
    return optimizer


def _made_here(optimizer: Any) -> Any:
    """The optimizer, with its variables on the strategy in scope.

    One made outside the scope has a learning rate that no chip can read; a
    copy made here takes its place, and is the one in `table_optimizers`.
    """
    if row_optimizers.is_native(optimizer):
        return optimizer
    if hasattr(optimizer.iterations.value, "values"):
        return optimizer
    return type(optimizer).from_config(optimizer.get_config())


def _refuse_learned(feature: Feature, weights: Any) -> None:
    if weights is None:
        return
    parts = tf.nest.flatten(weights, expand_composites=True)
    if private_tensorflow.is_watched([p for p in parts if p.dtype.is_floating]):
        raise ValueError(
            f"{feature.where}: no gradient reaches the weights of a table "
            "with placement 'sparsecore', and a tape asks for one. Use "
            "placement='default_device', or tf.stop_gradient on the weights."
        )


def _declared_width(feature: Feature) -> int | None:
    if feature.input_shape is None:
        return None
    return (*feature.input_shape, 1)[1]


def _positions(feature: Feature, width: int | None) -> int:
    if feature.is_combined:
        return 1
    assert feature.output_shape is not None
    positions = feature.output_shape[1] or _declared_width(feature) or width
    if positions is None:
        raise ValueError(
            f"{feature.where}: placement 'sparsecore' needs a static number "
            "of positions. Give it as the second entry of output_shape. "
            f"Received: output_shape={feature.output_shape}"
        )
    return positions


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
