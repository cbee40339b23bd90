"""Step helpers: one compiled function for a step on every strategy."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_distembed import replica_gradients, replica_steps, step_losses
from tf_distembed.step_calls import Predict, Step

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
            compiled loop (under `MultiWorkerMirroredStrategy`, and with None
            in the batches of several replicas, in a loop of compiled steps).
            A call at the end of the data takes those left.

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
    if strategy.num_replicas_in_sync > 1:
        _check_optimizer(model.optimizer)
        replica_gradients.clip_the_sum(model.optimizer)
    replica_gradients.agree_on_finite_gradients(model.optimizer)
    return Step(model, strategy, replica_steps.train, steps_per_call)


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
    return Step(model, strategy, replica_steps.evaluate, steps_per_call)


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
    return Predict(model, _strategy_of(model, strategy))


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
    if strategy.num_replicas_in_sync > 1 or isinstance(
        strategy, tf.distribute.TPUStrategy
    ):
        step_losses.check_reductions(model)
        if model.jit_compile:
            raise ValueError(
                "jit_compile=True cannot compile the exchange between "
                "replicas. Compile the model with jit_compile=False; a TPU "
                "compiles anyway."
            )
    return strategy


def _check_optimizer(optimizer: Any) -> None:
    """Raises for what Keras itself cannot do on several replicas."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    for name, instead in (
        ("gradient_accumulation_steps", "Use a larger batch"),
        ("ema_overwrite_frequency", "Leave it out; fit sets the averages last"),
    ):
        value = getattr(optimizer, name, None)
        if value and (optimizer.use_ema or not name.startswith("ema")):
            raise ValueError(
                f"The optimizer '{optimizer.name}' has {name}={value}, which "
                f"Keras cannot do on several replicas. {instead}."
            )


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
