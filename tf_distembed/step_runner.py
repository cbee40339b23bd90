"""How a step runs: a function on every replica's part of a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_distembed import replica_batches
from tf_distembed.distributed_data import BatchHint, hint_of


class Runner:
    """Runs a function on every replica's part of a batch.

    Args:
        model: The model, built with the first batch if it is not yet.
        strategy: Its strategy.
        replica: `(model, data, valid) -> outputs`, run in each replica.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        replica: Callable[..., Any],
    ) -> None:
        self._model = model
        self.strategy = strategy
        self._replica = replica
        if model.compiled and model.jit_compile:
            self._replica = _compiled_by_xla(replica)
        self._fixed_rows = isinstance(strategy, tf.distribute.TPUStrategy)
        # Rows of a replica's part, where they are fixed and not static.
        self._rows: int | None = None
        self._pad = True
        self._traced: set[Any] = set()
        self._on_parts: Any = self._compiled(self._run_parts)
        self._prepared = False

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return function
        return tf.function(function, autograph=False)

    def prepare(self, batch: Any) -> tuple[Any, ...]:
        """Builds the model for a batch; the batch's parts."""
        parts = replica_batches.split(self.strategy, batch)
        self.build(parts[0])
        if self._fixed_rows and self._rows is None:
            self._rows = max(
                int(replica_batches.rows_of(replica_batches.first_input(part)))
                for part in parts
            )
        return parts

    def build(self, data: Any) -> None:
        """Builds model, metrics and optimizer for tensors or their specs."""
        if self._prepared:
            return
        # Not where a replica is traced: variables belong to all replicas.
        with self.strategy.scope():
            self._build(data)
        self._prepared = True

    def _build(self, data: Any) -> None:
        model = self._model
        model._symbolic_build(data_batch=data)
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)

    def take_hint(self, data: Any) -> None:
        """Reads what `distribute_dataset` was told."""
        hint: BatchHint = hint_of(data)
        self._pad = hint.pad
        if hint.rows is not None:
            self._rows = hint.rows

    def on_batch(self, batch: Any) -> Any:
        """Runs on a batch given eagerly; one trace for all sizes."""
        parts = self.prepare(batch)
        parts = tf.nest.map_structure(
            lambda one: (
                one
                if one is None
                or isinstance(one, (tf.SparseTensor, tf.RaggedTensor))
                else tf.convert_to_tensor(one)
            ),
            parts,
        )
        if not self._model.run_eagerly:
            specs = replica_batches.relaxed_specs(parts)
            key = (
                tuple(tf.nest.flatten(specs)),
                str(tf.nest.map_structure(lambda _: 0, specs)),
            )
            if key not in self._traced:
                self._traced.add(key)
                self._on_parts.get_concrete_function(specs)
        return self._finished(self._on_parts(parts))

    def _finished(self, result: Any) -> Any:
        return result

    def _run_parts(self, parts: Any) -> Any:
        return self.finish(*self.run_split(parts))

    def finish(self, outputs: Any, counts: Any) -> Any:
        """What the function returns, from what the replicas returned."""
        return outputs

    def run(self, batch: Any) -> tuple[Any, Any]:
        """Runs on a batch in a graph."""
        return self.run_split(replica_batches.split(self.strategy, batch))

    def run_split(self, parts: Any) -> tuple[Any, Any]:
        """The outputs of all replicas, and the real rows of those here."""
        counts = [
            replica_batches.rows_of(replica_batches.first_input(part))
            for part in parts
        ]
        valid: Any = None
        if self._fixed_rows and not all(
            map(replica_batches.has_static_rows, parts)
        ):
            assert self._rows is not None
            filled = [
                replica_batches.fill_up(part, self._rows, pad=self._pad)
                for part in parts
            ]
            parts = [data for data, _ in filled]
            valid = replica_batches.join(
                self.strategy, [mask for _, mask in filled]
            )
        data = replica_batches.join(self.strategy, parts)

        def replica(data: Any, valid: Any) -> Any:
            return self._replica(self._model, data, valid)

        return self.strategy.run(replica, args=(data, valid)), counts


def _compiled_by_xla(replica: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def compiled(model: keras.Model) -> Any:
        return tf.function(
            lambda data, valid: replica(model, data, valid),
            autograph=False,
            jit_compile=True,
        )

    return lambda model, data, valid: compiled(model)(data, valid)
