"""Step helpers: one compiled function for a step on every strategy."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_distembed import real_rows, replica_batches, step_losses
from tf_distembed.strategy import BatchHint, hint_of

#: model -> the step that its compiled metrics belong to now.
_metrics_of: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
#: model -> what a step helper compiled it with.
_compiled_with: weakref.WeakKeyDictionary[Any, tuple[Any, Any, Any]] = (
    weakref.WeakKeyDictionary()
)


def make_train_step(
    model: keras.Model,
    *,
    loss: Any = None,
    optimizer: Any = None,
    metrics: Any = None,
    strategy: tf.distribute.Strategy | None = None,
    steps_per_call: int = 1,
) -> Step:
    """One training step as a compiled function, on any strategy.

    Loss, gradients, updated rows and metrics are those that one device gives
    for the same global batch: the loss is the sum over the examples of the
    global batch divided by their number, however they lie on the replicas.

    Args:
        model: A compiled model; or one that is not, with `loss` and
            `optimizer`, which it is then compiled with.
        loss: As `model.compile` takes it.
        optimizer: As `model.compile` takes it.
        metrics: As `model.compile` takes it.
        strategy: In whose scope the model was made; None finds it.
        steps_per_call: Steps that one call takes from an iterator, in one
            compiled loop. A call at the end of the data takes those left.

    Returns:
        A function `step(iterator)`; with `steps_per_call=1` also
        `step(batch)`. Elements are `x`, `(x, y)` or `(x, y, sample_weight)`.
        It returns `{"loss": ..., metric name: ...}`, scalars: running means
        since `step.reset()`. An iterator at its end raises
        `tf.errors.OutOfRangeError`.

    Raises:
        TypeError: no Keras model.
        ValueError: it is not compiled, or has a setting that a step cannot
            honour.

    Example:

    ```python
    import keras
    import numpy as np
    import tensorflow as tf
    import tf_distembed as tde

    table = tde.TableConfig("movie", 100, 4, optimizer="adagrad")
    model = keras.Sequential([
        keras.Input((3,), dtype="int64"),
        tde.DistributedEmbedding(tde.FeatureConfig("movie", table)),
        keras.layers.Dense(1),
    ])
    model.compile("adam", "mse")
    rows = np.ones((8, 3), int), np.ones(8)
    data = tf.data.Dataset.from_tensor_slices(rows)
    step = tde.make_train_step(model)
    for batch in tde.distribute_dataset(data.batch(4)):
        logs = step(batch)
    assert logs["loss"] < 2
    ```
    """
    strategy = _prepare(model, loss, optimizer, metrics, strategy)
    if model.optimizer is None:
        raise ValueError("The model is compiled without an optimizer.")
    step_losses.agree_on_finite_gradients(model.optimizer)
    return Step(model, strategy, _train, steps_per_call)


def make_eval_step(
    model: keras.Model,
    *,
    loss: Any = None,
    metrics: Any = None,
    strategy: tf.distribute.Strategy | None = None,
    steps_per_call: int = 1,
) -> Step:
    """One evaluation step as a compiled function, on any strategy.

    Args and what it returns are as of `make_train_step`. The compiled metrics
    are the model's: they start again when the helpers of one model take
    turns, as they do between Keras' `fit` and `evaluate`.

    Example:

    ```python
    import keras
    import numpy as np
    import tensorflow as tf
    import tf_distembed as tde

    table = tde.TableConfig("movie", 100, 4, optimizer="adagrad")
    model = keras.Sequential([
        keras.Input((3,), dtype="int64"),
        tde.DistributedEmbedding(tde.FeatureConfig("movie", table)),
        keras.layers.Dense(1),
    ])
    rows = np.ones((5, 3), int), np.ones(5)
    data = tf.data.Dataset.from_tensor_slices(rows)
    step = tde.make_eval_step(model, loss="mse", metrics=["mae"])
    for batch in tde.distribute_dataset(data.batch(4)):
        logs = step(batch)
    assert set(logs) == {"loss", "mae"}
    ```
    """
    strategy = _prepare(model, loss, None, metrics, strategy)
    return Step(model, strategy, _evaluate, steps_per_call)


def make_predict_step(
    model: keras.Model,
    *,
    strategy: tf.distribute.Strategy | None = None,
) -> Callable[[Any], Any]:
    """Predictions for a batch as a compiled function, on any strategy.

    Args:
        model: A model, compiled or not.
        strategy: In whose scope the model was made; None finds it.

    Returns:
        A function of a batch (`x`, `(x, y)` or `(x, y, sample_weight)`) or of
        an iterator. It returns the model's outputs for the whole batch, in
        the order of the inputs and without added rows.

    Raises:
        TypeError: no Keras model.

    Example:

    ```python
    import keras
    import numpy as np
    import tensorflow as tf
    import tf_distembed as tde

    table = tde.TableConfig("movie", 100, 4, optimizer="adagrad")
    model = keras.Sequential([
        keras.Input((3,), dtype="int64"),
        tde.DistributedEmbedding(tde.FeatureConfig("movie", table)),
    ])
    predict = tde.make_predict_step(model)
    assert predict(tf.constant([[1, 2, 3]])).shape == (1, 4)
    ```
    """
    _check_model(model)
    return _Predict(model, _strategy_of(model, strategy))


class _Runner:
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
        x, _, _ = replica_batches.unpack(data)
        model = self._model
        if model.compiled:
            model._symbolic_build(data_batch=data)
            if model.optimizer is not None and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
        elif not all(layer.built for layer in model._flatten_layers()):
            model(
                keras.tree.map_structure(
                    lambda one: keras.KerasTensor(one.shape, one.dtype.name), x
                )
            )

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


class Step(_Runner):
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


class _Predict(_Runner):
    """What `make_predict_step` returns."""

    def __init__(
        self, model: keras.Model, strategy: tf.distribute.Strategy
    ) -> None:
        super().__init__(model, strategy, _predict)

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


def _train(model: keras.Model, data: Any, valid: tf.Tensor | None) -> None:
    x, y, sample_weight = replica_batches.unpack(data)
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        y_pred = _call(model, x, valid, training=True)
        loss, count = step_losses.replica_loss(
            model, x, y, y_pred, sample_weight, valid, training=True
        )
        scaled = model.optimizer.scale_loss(loss)
    if variables:
        gradients = tape.gradient(scaled, variables)
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    _update_means(model, x, y, y_pred, sample_weight, valid, loss, count)


def _evaluate(model: keras.Model, data: Any, valid: tf.Tensor | None) -> None:
    x, y, sample_weight = replica_batches.unpack(data)
    y_pred = _call(model, x, valid, training=False)
    loss, count = step_losses.replica_loss(
        model, x, y, y_pred, sample_weight, valid, training=False
    )
    _update_means(model, x, y, y_pred, sample_weight, valid, loss, count)


def _predict(model: keras.Model, data: Any, valid: tf.Tensor | None) -> Any:
    x, _, _ = replica_batches.unpack(data)
    return _call(model, x, valid, training=False)


def _call(
    model: keras.Model, x: Any, valid: tf.Tensor | None, training: bool
) -> Any:
    with real_rows.marked(valid):
        if model._call_has_training_arg:
            return model(x, training=training)
        return model(x)


def _update_means(
    model: keras.Model,
    x: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    valid: tf.Tensor | None,
    loss: tf.Tensor,
    count: tf.Tensor,
) -> None:
    whole = step_losses.sum_over_replicas(tf.cast(loss, tf.float32))
    for metric in model.metrics:
        if metric.name == "loss":
            metric.update_state(whole, sample_weight=count)
    step_losses.update_metrics(model, x, y, y_pred, sample_weight, valid)


def _compiled_by_xla(replica: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def compiled(model: keras.Model) -> Any:
        return tf.function(
            lambda data, valid: replica(model, data, valid),
            autograph=False,
            jit_compile=True,
        )

    return lambda model, data, valid: compiled(model)(data, valid)


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"model must be a keras.Model. Received: {model!r} (of type "
            f"{type(model).__name__})"
        )


def _strategy_of(
    model: keras.Model, strategy: tf.distribute.Strategy | None
) -> tf.distribute.Strategy:
    own = model.distribute_strategy
    if strategy is None:
        return own
    if strategy is not own and (
        strategy.num_replicas_in_sync > 1 or own.num_replicas_in_sync > 1
    ):
        raise ValueError(
            f"The model was made under a {type(own).__name__}, not under the "
            f"{type(strategy).__name__} that was given. Make model and layers "
            "inside `with strategy.scope():`."
        )
    return strategy


def _prepare(
    model: Any,
    loss: Any,
    optimizer: Any,
    metrics: Any,
    strategy: tf.distribute.Strategy | None,
) -> tf.distribute.Strategy:
    """Checks a model, compiles it if asked to; its strategy."""
    _check_model(model)
    strategy = _strategy_of(model, strategy)
    _compile(model, strategy, loss, optimizer, metrics)
    for name in ("train_step", "test_step"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ValueError(
                f"{type(model).__name__} has a {name} of its own, which the "
                "step helpers do not call. Use model.fit, or a loop with "
                "strategy.run."
            )
    several = strategy.num_replicas_in_sync > 1
    if several or isinstance(strategy, tf.distribute.TPUStrategy):
        step_losses.check_reductions(model)
    if several and model.jit_compile:
        raise ValueError(
            "jit_compile=True cannot compile the exchange between replicas. "
            "Compile the model with jit_compile=False; a TPU compiles anyway."
        )
    return strategy


def _compile(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    loss: Any,
    optimizer: Any,
    metrics: Any,
) -> None:
    given = (loss, optimizer, metrics)
    if all(one is None for one in given):
        if not model.compiled:
            raise ValueError(
                "The model is not compiled. Call model.compile, or pass loss "
                "and optimizer."
            )
        return
    if model.compiled:
        before = _compiled_with.get(model, (None, None, None))
        for name, one, other in zip(
            ("loss", "optimizer", "metrics"), given, before, strict=True
        ):
            if one is not None and one is not other and one != other:
                raise ValueError(
                    f"The model is compiled already, without this {name}. Pass "
                    "it to model.compile, or give a model that is not "
                    f"compiled. Received: {name}={one!r}"
                )
        return
    with strategy.scope():
        model.compile(
            optimizer="rmsprop" if optimizer is None else optimizer,
            loss=loss,
            metrics=metrics,
            jit_compile=False,
        )
    _compiled_with[model] = given
