"""What the two TPU backends have in common: how they are called and when.

A layer on a TPU is called inside `strategy.run`, with a static batch, once in
a training step, and its tables are updated when the gradient of the layer's
trainable variables is computed.
"""

from __future__ import annotations

import abc
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
from tf_distembed.backends.tpu_optimizers import check_rule
from tf_distembed.config import TableConfig
from tf_distembed.features import Feature
from tf_distembed.id_statistics import DroppedIds
from tf_distembed.initial_values import InitialValues
from tf_distembed.row_optimizers import RowOptimizer
from tf_distembed.stacking import Stack, make_stacks
from tf_distembed.tables import VALUES

_PATTERN = """
    @tf.function
    def train_step(iterator):
        def step(inputs):
            with tf.GradientTape() as tape:
                loss = ...layer(inputs)...
            tape.gradient(loss, layer.trainable_variables)
        strategy.run(step, args=(next(iterator),))
"""


@dataclasses.dataclass
class StackState:
    """One stack: its tables and, if it is trained, rule and clock."""

    stack: Stack
    rule: Any
    clock: RowOptimizer | None


class TpuBackend(base.Backend):
    """Tables that a `tf.tpu.experimental.embedding` object holds.

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
        ValueError: a table, optimizer or setting that a TPU's embedding
            hardware cannot have.
    """

    placement = "sparsecore"
    #: SparseCores of a chip; a replica's rows are divided over them.
    cores_per_chip: int = 1

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
        self.dropped = dropped
        self._strategy = tf.distribute.get_strategy()
        self._pipelining = settings.pipeline_execution_with_tensor_core
        self._layer_name = layer_name
        self._tables = {table.name: table for table in tables}
        own = {t.name: _own_optimizer(t, optimizers[t.name]) for t in tables}
        keys = {
            table.name: {
                "embedding_dim": table.embedding_dim,
                "optimizer": row_optimizers.stack_key(table, own[table.name]),
            }
            for table in tables
        }
        stacks = make_stacks(tables, features, table_stacking, keys)
        self._stacks = [_stack_state(stack, own) for stack in stacks]
        self.optimizers = {
            table.name: state.clock.in_use()
            for state in self._stacks
            if state.clock is not None
            for table in state.stack.tables
        }
        self.trap = GradientTrap(layer_name, bool(self.optimizers))
        self._rows: int | None = None
        # What was restored before the variables were there.
        self._pending: list[tuple[str, str, Any, Any]] = []
        self._embedding: Any = None
        self._updated: weakref.WeakSet[Any] = weakref.WeakSet()

    @abc.abstractmethod
    def _make_embedding(
        self,
        rows: int,
        positions: dict[str, int],
        widths: dict[str, int | None],
    ) -> Callable[[], Any]:
        """What makes TensorFlow's object and its variables.

        Args:
            rows: Examples of a replica's batch.
            positions: feature name -> samples of one example.
            widths: feature name -> ids of an example, where known.

        Returns:
            A function, to be called in the strategy's scope.
        """

    @abc.abstractmethod
    def _look_up(
        self, ids: Sequence[Any], weights: Sequence[Any], training: bool
    ) -> tuple[list[tf.Tensor], Any]:
        """Outputs of all features, and what `_apply` needs."""

    @abc.abstractmethod
    def _apply(self, upstream: list[tf.Tensor], saved: Any) -> None:
        """Updates all tables by the gradients of the outputs."""

    @abc.abstractmethod
    def _read(self, table: str, slot: str, ids: np.ndarray) -> np.ndarray:
        """Rows of TensorFlow's own variable, `[N, embedding_dim]`."""

    @abc.abstractmethod
    def _write(
        self, table: str, slot: str, ids: np.ndarray, values: np.ndarray
    ) -> None:
        """Overwrites rows of TensorFlow's own variable."""

    @abc.abstractmethod
    def _added(self, table: str, slot: str) -> float:
        """What TensorFlow's slot holds beyond Keras' slot."""

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
        chips = self._num_chips
        cores = self.cores_per_chip
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
        make_embedding = self._make_embedding(rows, positions, widths)

        def make() -> None:
            with self._strategy.scope():
                self._embedding = make_embedding()
                self._rows = rows
                for name in self._tables:
                    self._set_initial(name)
                pending, self._pending = self._pending, []
                for change in pending:
                    self.write_rows(*change)

        _outside_of_tracing(make)

    @property
    def _num_chips(self) -> int:
        return self._strategy.num_replicas_in_sync

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
        context = tf.distribute.get_replica_context()

        @tf.custom_gradient
        def looked_up(trap: tf.Tensor) -> Any:
            activations, saved = self._look_up(ids, weights, training)

            def gradient(*upstream: tf.Tensor) -> tf.Tensor:
                self._update(list(upstream), saved, context)
                return tf.zeros_like(trap)

            return list(activations), gradient

        found = looked_up(tf.convert_to_tensor(self.trap.value))
        return [
            one if n is None else one[:n]
            for one, n in zip(found, rows, strict=True)
        ]

    def _update(
        self,
        upstream: list[tf.Tensor],
        saved: Any,
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
        self._apply(upstream, saved)
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
                batch = max(known) * self._num_chips
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
                whole = rows * self._num_chips
                hint = (
                    " That is the global batch; strategy.run takes a "
                    "replica's part of it."
                    if found == whole and found != rows
                    else ""
                )
                raise ValueError(
                    f"{feature.where}: a replica's batch has at most {rows} "
                    f"examples (a global batch of {whole} over "
                    f"{self._num_chips} replicas). Received: {found} "
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
        if not self.is_built:
            raise RuntimeError(
                f"Layer '{self._layer_name}' has no variables yet: declare the "
                "global batch as the first entry of input_shape or "
                "output_shape, or call the layer once."
            )
        rows = self._read(table, slot, np.arange(start, stop))
        return tf.constant(rows - np.float32(self._added(table, slot)))

    def write_rows(self, table: str, slot: str, ids: Any, values: Any) -> None:
        if not self.is_built:
            kept = np.array(ids), np.array(values, np.float32)
            self._pending.append((table, slot, *kept))
            return
        rows = np.asarray(values, np.float32)
        rows = rows + np.float32(self._added(table, slot))
        self._write(table, slot, np.asarray(ids), rows)

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

    def _state_of(self, table: str) -> StackState:
        for state in self._stacks:
            if any(one.name == table for one in state.stack.tables):
                return state
        raise KeyError(table)


def _stack_state(stack: Stack, own: dict[str, Any]) -> StackState:
    first = stack.tables[0]
    optimizer = own[first.name]
    if optimizer is None:
        return StackState(stack, None, None)
    where = f"Table '{first.name}'"
    rule = row_optimizers.rule_of(optimizer, where)
    check_rule(rule, where)
    clock = RowOptimizer(_made_here(optimizer), first.name)
    return StackState(stack, rule, clock)


def declared_width(feature: Feature) -> int | None:
    """Ids of an example, if the feature declares it."""
    if feature.input_shape is None:
        return None
    return (*feature.input_shape, 1)[1]


def _positions(feature: Feature, width: int | None) -> int:
    if feature.is_combined:
        return 1
    assert feature.output_shape is not None
    positions = feature.output_shape[1] or declared_width(feature) or width
    if positions is None:
        raise ValueError(
            f"{feature.where}: placement 'sparsecore' needs a static number "
            "of positions. Give it as the second entry of output_shape. "
            f"Received: output_shape={feature.output_shape}"
        )
    return positions


def _outside_of_tracing(function: Callable[[], None]) -> None:
    """Calls a function as if no replica were being traced.

    `tf.init_scope` leaves the graph, but not the replica; a new thread has
    neither.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as threads:
        threads.submit(function).result()


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
