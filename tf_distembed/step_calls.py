"""The functions that `make_train_step` and its kin return."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_distembed import replica_batches, replica_steps
from tf_distembed.step_runner import Runner

#: model -> the step that its compiled metrics belong to now.
_metrics_of: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class Step(Runner):
    """What `make_train_step` and `make_eval_step` return.

    Attributes:
        strategy: The strategy it runs on.
        steps_per_call: Steps that a call takes from an iterator.
        taken: Steps that the last call took.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        replica: Callable[..., Any],
        steps_per_call: int,
    ) -> None:
        if isinstance(steps_per_call, bool) or not isinstance(
            steps_per_call, int
        ):
            raise TypeError(
                f"steps_per_call must be an int. Received: {steps_per_call!r}"
            )
        if steps_per_call < 1:
            raise ValueError(
                f"steps_per_call must be at least 1. Received: {steps_per_call}"
            )
        super().__init__(model, strategy, replica)
        self.steps_per_call = steps_per_call
        self.taken = 0
        self._on_iterator = self._compiled(self._run_iterator)

    def __call__(
        self, data: Any, steps: int | None = None
    ) -> dict[str, tf.Tensor]:
        """Takes one step on a batch, or several from an iterator.

        Args:
            data: A batch or an iterator.
            steps: From an iterator at most so many; None is `steps_per_call`.
        """
        self.taken = 1
        owner = _metrics_of.get(self._model)
        if owner is None or owner() is not self:
            self.reset()
        if not replica_batches.is_iterator(data):
            if self.steps_per_call > 1:
                raise ValueError(
                    f"With steps_per_call={self.steps_per_call} a step takes "
                    "an iterator: iter(tde.distribute_dataset(dataset))."
                )
            return self.on_batch(data)
        self.take_hint(data)
        if self.steps_per_call == 1:
            return self.on_batch(data.get_next())
        wanted = self.steps_per_call if steps is None else steps
        if not self._loops_in_graph(data):
            return self._one_by_one(data, wanted)
        first = 0
        logs: dict[str, tf.Tensor] = {}
        if not self._prepared or (
            self._fixed_rows
            and self._rows is None
            and not replica_batches.has_static_rows(data.element_spec)
        ):
            # The first batch is looked at before anything is traced.
            logs = self.on_batch(data.get_next())
            first, wanted = 1, wanted - 1
            if not wanted:
                return logs
        taken, later = self._on_iterator(data, tf.constant(wanted))
        self.taken = first + int(taken)
        if int(taken) == 0:
            if logs:
                return logs
            raise tf.errors.OutOfRangeError(None, None, "End of the data.")
        return self._finished(later)

    def _loops_in_graph(self, iterator: Any) -> bool:
        """Whether TensorFlow can loop over the batches within a graph.

        The collectives of workers keep the shapes of their first use there,
        and batches of several replicas cannot hold None.
        """
        strategy = self.strategy
        if strategy.num_replicas_in_sync == 1:
            return True
        leaves = replica_batches.leaves_of(iterator.element_spec)
        return not any(leaf is None for leaf in leaves) and not isinstance(
            strategy, tf.distribute.MultiWorkerMirroredStrategy
        )

    def _one_by_one(self, iterator: Any, wanted: int) -> dict[str, tf.Tensor]:
        """The same steps, each with a call of its own."""
        logs: dict[str, tf.Tensor] = {}
        self.taken = 0
        while self.taken < wanted:
            try:
                batch = iterator.get_next()
            except tf.errors.OutOfRangeError:
                if not self.taken:
                    raise
                break
            logs = self.on_batch(batch)
            self.taken += 1
        return logs

    def reset(self) -> None:
        """Starts the running means again."""
        self._model.reset_metrics()
        _metrics_of[self._model] = weakref.ref(self)

    def finish(self, outputs: Any, counts: Any) -> Any:
        """The metrics so far, over all replicas."""
        return None if self._fixed_rows else self._model.get_metrics_result()

    def _finished(self, result: Any) -> Any:
        # Inside a function a TPU's variables give the first replica's means.
        if self._fixed_rows:
            return self._model.get_metrics_result()
        return result

    def _run_iterator(
        self, iterator: Any, steps: tf.Tensor
    ) -> tuple[tf.Tensor, Any]:
        def goes_on(taken: tf.Tensor, batch: Any) -> tf.Tensor:
            return tf.logical_and(taken < steps, batch.has_value())

        def take(taken: tf.Tensor, batch: Any) -> Any:
            self.run(batch.get_value())
            taken += 1
            # One that is not used would be lost.
            batch = tf.cond(
                taken < steps, iterator.get_next_as_optional, lambda: batch
            )
            return taken, batch

        # One at a time: the replicas' exchanges in one iteration have the same
        # keys as those in the next, and would meet them.
        taken, _ = tf.while_loop(
            goes_on,
            take,
            [tf.constant(0), iterator.get_next_as_optional()],
            parallel_iterations=1,
        )
        return taken, self.finish(None, None)


class Predict(Runner):
    """What `make_predict_step` returns."""

    def __init__(
        self, model: keras.Model, strategy: tf.distribute.Strategy
    ) -> None:
        super().__init__(model, strategy, replica_steps.predict)

    def _build(self, data: Any) -> None:
        # Elements may have no labels, which losses and metrics would need.
        model = self._model
        if all(layer.built for layer in model._flatten_layers()):
            return
        x, _, _ = replica_batches.unpack(data)
        model(
            keras.tree.map_structure(
                lambda one: (
                    one
                    if one is None
                    else keras.KerasTensor(one.shape, one.dtype.name)
                ),
                x,
            )
        )

    def __call__(self, data: Any) -> Any:
        """The outputs for a batch, or for the next one of an iterator."""
        self.take_hint(data)
        if replica_batches.is_iterator(data):
            data = data.get_next()
        return self.on_batch(data)

    def finish(self, outputs: Any, counts: Any) -> Any:
        """Outputs of all replicas in one, without added rows."""
        strategy = self.strategy
        many_workers = isinstance(
            strategy, tf.distribute.MultiWorkerMirroredStrategy
        )

        def whole(output: Any) -> Any:
            if many_workers:
                return strategy.gather(output, axis=0)
            parts = strategy.experimental_local_results(output)
            cut = [one[:n] for one, n in zip(parts, counts, strict=True)]
            return cut[0] if len(cut) == 1 else tf.concat(cut, 0)

        return tf.nest.map_structure(whole, outputs)
