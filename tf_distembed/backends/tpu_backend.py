"""What the two TPU backends have in common: how they are called and when.

A layer on a TPU is called inside `strategy.run`, with a static batch, once in
a training step, and its tables are updated when the gradient of the layer's
trainable variables is computed.
"""

from __future__ import annotations

import abc
import concurrent.futures
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_distembed.backends import (
    private_tensorflow,
    replica_inputs,
    tpu_batch,
    tpu_optimizers,
    tpu_stacks,
)
from tf_distembed.backends.gradient_trap import GradientTrap
from tf_distembed.backends.sparsecore_host import HostRules
from tf_distembed.backends.tpu_state import TpuState
from tf_distembed.config import TableConfig
from tf_distembed.features import Feature
from tf_distembed.id_statistics import DroppedIds

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


class TpuBackend(TpuState):
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
        self._settings = settings
        self._layer_name = layer_name
        self._strategy = tf.distribute.get_strategy()
        stacks = tpu_stacks.make_tpu_stacks(
            tables, features, optimizers, self._stacking(table_stacking)
        )
        super().__init__(tables, stacks, layer_name)
        self.optimizers = {
            table.name: one.clock.in_use()
            for one in self._stacks
            if one.clock is not None
            for table in one.stack.tables
        }
        self.trap = GradientTrap(layer_name, bool(self.optimizers))
        self._rules: HostRules | None = None
        self._updated: weakref.WeakSet[Any] = weakref.WeakSet()
        self._prepare()
        batch = tpu_batch.declared_batch(features)
        if batch is not None:
            self.build(batch, {})

    @abc.abstractmethod
    def _stacking(self, table_stacking: Any) -> Any:
        """The stacking that this hardware can do; raises for settings."""

    @abc.abstractmethod
    def _prepare(self) -> None:
        """Called once the stacks are known."""

    @abc.abstractmethod
    def _host_rules(
        self,
        rows: int,
        positions: dict[str, int],
        widths: dict[str, int | None],
    ) -> HostRules:
        """What is done with a batch of a replica on the host.

        Args:
            rows: Examples of a replica's batch.
            positions: feature name -> samples of one example.
            widths: feature name -> ids of an example, where known.
        """

    @abc.abstractmethod
    def _table_arguments(self, table: str) -> dict[str, Any]:
        """Name and other arguments of TensorFlow's `TableConfig`."""

    @abc.abstractmethod
    def _make_embedding(self, rules: HostRules, features: list[Any]) -> Any:
        """TensorFlow's object, not built, for its own features."""

    @abc.abstractmethod
    def _look_up(
        self, ids: list[Any], weights: list[Any] | None, training: bool
    ) -> tuple[Sequence[tf.Tensor], Any]:
        """Outputs of all features, and what `_apply` needs."""

    @abc.abstractmethod
    def _apply(self, upstream: list[tf.Tensor], saved: Any) -> None:
        """Updates all tables by the gradients of the outputs."""

    # -- the variables ------------------------------------------------------

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
        rows = tpu_batch.rows_of_replica(
            global_batch, self._num_chips, self.cores_per_chip, self._layer_name
        )
        positions = {
            f.name: tpu_batch.positions_of(f, widths.get(f.name))
            for f in self.features
        }
        rules = self._host_rules(rows, positions, widths)
        tables = self._native_tables()
        features = [
            _native.FeatureConfig(
                table=tables[feature.table.name],
                # TensorFlow joins and sorts names; users' could collide then.
                name=f"feature{i:06d}",
                output_shape=[rows]
                if feature.is_combined
                else [rows, positions[feature.name]],
            )
            for i, feature in enumerate(self.features)
        ]

        def make() -> None:
            with self._strategy.scope():
                embedding = self._make_embedding(rules, features)
                embedding.build()
                self._embedding = embedding
                self._rules = rules
                self.set_values()

        _outside_of_tracing(make)

    @property
    def _num_chips(self) -> int:
        return self._strategy.num_replicas_in_sync

    def _native_tables(self) -> dict[str, Any]:
        tables = {}
        for one in self._stacks:
            optimizer = tpu_optimizers.frozen_optimizer()
            if one.clock is not None:
                optimizer = tpu_optimizers.native_optimizer(one.rule, one.clock)
            for table in one.stack.tables:
                tables[table.name] = _native.TableConfig(
                    vocabulary_size=table.vocabulary_size,
                    dim=table.embedding_dim,
                    optimizer=optimizer,
                    combiner=table.combiner,
                    **self._table_arguments(table.name),
                )
        return tables

    def keras_parts(self) -> dict[str, Any]:
        # No table has this name: names of tables have no "/".
        return {"/gradient_trap": self.trap}

    # -- lookup and update --------------------------------------------------

    def lookup(
        self, ids: Sequence[Any], weights: Sequence[Any], training: bool
    ) -> list[tf.Tensor]:
        self._check_place()
        if not self.is_built:
            batch = tpu_batch.batch_of(
                self.features, ids, self._num_chips, self._layer_name
            )
            self.build(batch, tpu_batch.widths_of(self.features, ids))
        rules = self._rules
        assert rules is not None
        tpu_batch.check_rows(self.features, ids, rules.rows, self._num_chips)
        for feature, one, weight in zip(
            self.features, ids, weights, strict=True
        ):
            self._check_input(feature, one, weight)
        given = list(weights) if any(w is not None for w in weights) else None
        context = tf.distribute.get_replica_context()

        @tf.custom_gradient
        def looked_up(trap: tf.Tensor) -> Any:
            activations, saved = self._look_up(list(ids), given, training)

            def gradient(*upstream: tf.Tensor) -> tf.Tensor:
                self._update(list(upstream), saved, context)
                return tf.zeros_like(trap)

            return list(activations), gradient

        found = looked_up(tf.convert_to_tensor(self.trap.value))
        return [
            tpu_batch.cut_back(output, one, rules.rows, counted)
            for output, one, counted in zip(
                found, ids, rules.counted, strict=True
            )
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
                "step, or the gradient of a call was computed twice. Tables "
                "with placement 'sparsecore' are updated when a gradient is "
                "computed, so the second one would be a second step. Make "
                "both inputs features of one layer, and compute the gradient "
                "once."
            )
        self._updated.add(context)
        self._apply(upstream, saved)
        # At the end of its data Keras' `fit` begins a step that gets none: on
        # the emulator only what waits for data is not done then.
        with tf.control_dependencies(upstream):
            for one in self._stacks:
                if one.clock is not None:
                    one.clock.count_step()

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

    def _check_input(self, feature: Feature, ids: Any, weights: Any) -> None:
        for what, one in (("ids", ids), ("weights", weights)):
            if not isinstance(one, tf.Tensor):
                continue
            if not replica_inputs.is_on_host(one, self._num_chips):
                raise ValueError(
                    f"{feature.where}: its {what} of shape {one.shape} are "
                    "computed on the TPU, from a batch whose size the trace "
                    f"does not know, and with {self._num_chips} chips they "
                    "cannot be sent to its host. Compute them in Dataset.map, "
                    "or use drop_remainder=True."
                )
        if weights is None:
            return
        parts = tf.nest.flatten(weights, expand_composites=True)
        floats = [part for part in parts if part.dtype.is_floating]
        if private_tensorflow.is_watched(floats):
            raise ValueError(
                f"{feature.where}: no gradient reaches the weights of a table "
                "with placement 'sparsecore', and a tape asks for one. Use "
                "placement='default_device', or tf.stop_gradient on the "
                "weights."
            )


def _outside_of_tracing(function: Callable[[], None]) -> None:
    """Calls a function as if no replica were being traced.

    `tf.init_scope` leaves the graph, but not the replica; a new thread has
    neither.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as threads:
        threads.submit(function).result()
