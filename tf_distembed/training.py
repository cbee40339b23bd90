"""`fit`: Keras' training loop on the step helpers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_distembed.backup import Backup
from tf_distembed.epoch_data import EpochData
from tf_distembed.step_calls import Step
from tf_distembed.steps import make_eval_step, make_train_step


def fit(
    model: keras.Model,
    dataset: Any,
    *,
    epochs: int = 1,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_data: Any = None,
    validation_steps: int | None = None,
    class_weight: dict[int, float] | None = None,
    callbacks: Sequence[keras.callbacks.Callback] | None = None,
    strategy: tf.distribute.Strategy | None = None,
    steps_per_call: int = 1,
    backup_dir: str | os.PathLike[str] | None = None,
    save_freq: str | int = "epoch",
    verbose: Any = "auto",
) -> keras.callbacks.History:
    """Trains a compiled model on any strategy, with dense and ragged data.

    On one device it gives what `model.fit` gives; on several replicas, it
    gives what one device gives for the same global batches, also for a short
    last batch.

    With `backup_dir`, a run that was killed goes on where its last backup was:
    call `fit` again with the same arguments. The backup holds the tables with
    their slots and step counts, the model's weights, random states and
    optimizer, the metrics of the running epoch, and the position in the data.
    The state of callbacks is not in it. The dataset must give the same batches
    in a given epoch; the batches of the running epoch that were done are read
    and skipped. A `shuffle` that changes with each epoch needs a seed; it is
    brought to the right epoch without reading.

    Args:
        model: A compiled `keras.Model`.
        dataset: A `tf.data.Dataset` of global batches `(x, y)` or `(x, y,
            sample_weight)`; what `distribute_dataset` returned; or a function
            of the epoch's number that returns one of these.
        epochs: The number of the last epoch, as in `model.fit`.
        initial_epoch: The number of the first epoch, from 0.
        steps_per_epoch: Batches of an epoch. The next epoch goes on with the
            batches that follow. None: an epoch is the whole dataset.
        validation_data: As `dataset`, evaluated after each epoch.
        validation_steps: Batches of it; None is all.
        class_weight: {class: weight}, as in `model.fit`.
        callbacks: Keras callbacks.
        strategy: In whose scope the model was made; None finds it.
        steps_per_call: Steps in one compiled loop. Callbacks see every
            `steps_per_call`-th batch.
        backup_dir: Where backups are written and looked for.
        save_freq: `"epoch"`, or the number of batches between two backups.
        verbose: As in `model.fit`.

    Returns:
        `keras.callbacks.History`; after a restart with all epochs.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: the model is not compiled, or a wrong value.

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
    data = tf.data.Dataset.from_tensor_slices(rows).batch(4)
    history = tde.fit(model, data, epochs=3, verbose=0)
    assert len(history.history["loss"]) == 3
    ```
    """
    _check_save_freq(save_freq)
    step = make_train_step(
        model, strategy=strategy, steps_per_call=steps_per_call
    )
    strategy = step.strategy
    data = EpochData(
        dataset, strategy, class_weight, steps_per_epoch is not None
    )
    step.build(data.first_spec(initial_epoch))
    evaluation = None
    if validation_data is not None:
        evaluation = EpochData(validation_data, strategy, None, False)
    steps = steps_per_epoch or data.number_of_batches(initial_epoch)
    listed = (
        callbacks
        if isinstance(callbacks, keras.callbacks.CallbackList)
        else keras.callbacks.CallbackList(
            list(callbacks or []),
            add_history=True,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=epochs,
            steps=steps,
            model=model,
        )
    )
    backup = None
    first_epoch, done = initial_epoch, 0
    step.reset()
    if backup_dir is not None:
        backup = Backup(model, backup_dir, strategy)
        backup.progress.epoch = initial_epoch
        if backup.restore():
            first_epoch = backup.progress.epoch
            done = backup.progress.step
            data.go_to(initial_epoch, first_epoch, backup.progress.batches)
    model.stop_training = False
    listed.on_train_begin()
    if backup is not None:
        model.history.epoch = list(backup.progress.epochs)
        model.history.history = {
            k: list(v) for k, v in backup.progress.history.items()
        }
    eval_step = None
    logs: dict[str, float] = {}
    for epoch in range(first_epoch, epochs):
        if not done:
            step.reset()
        if backup is not None and done:
            # Before it was interrupted, callbacks had set this epoch's rates.
            with backup.rates_kept():
                listed.on_epoch_begin(epoch)
        else:
            listed.on_epoch_begin(epoch)
        iterator = data.iterator(epoch, done)
        logs = {}
        saved = done
        while steps_per_epoch is None or done < steps_per_epoch:
            wanted = steps_per_call
            if steps_per_epoch is not None:
                wanted = min(wanted, steps_per_epoch - done)
            listed.on_train_batch_begin(done)
            try:
                tensors = step(iterator, wanted)
            except (tf.errors.OutOfRangeError, StopIteration):
                if steps_per_epoch is not None:
                    warnings.warn(
                        f"The dataset ended after {done} of the "
                        f"{steps_per_epoch} batches of epoch {epoch}. Use "
                        "dataset.repeat().",
                        stacklevel=2,
                    )
                    model.stop_training = True
                break
            done += step.taken
            logs = dict(tensors)
            listed.on_train_batch_end(done - 1, logs)
            if backup is not None:
                backup.progress.batches += step.taken
                if (
                    isinstance(save_freq, int)
                    and done // save_freq > saved // save_freq
                ):
                    saved = done
                    backup.progress.epoch, backup.progress.step = epoch, done
                    backup.save()
            if model.stop_training:
                break
        if not logs:
            # A restart after the last batch of an epoch.
            logs = dict(model.get_metrics_result())
        logs = {name: float(value) for name, value in logs.items()}
        if evaluation is not None:
            if eval_step is None:
                eval_step = make_eval_step(model, strategy=strategy)
            found = _evaluate(
                eval_step, evaluation, epoch, validation_steps, listed
            )
            logs |= {f"val_{name}": value for name, value in found.items()}
        listed.on_epoch_end(epoch, logs)
        done = 0
        if backup is not None:
            backup.progress.epoch, backup.progress.step = epoch + 1, 0
            backup.progress.epochs = list(model.history.epoch)
            backup.progress.history = {
                k: [float(one) for one in v]
                for k, v in model.history.history.items()
            }
            backup.save()
        if model.stop_training:
            break
    if epochs > first_epoch:
        model.optimizer.finalize_variable_values(model.trainable_variables)
    listed.on_train_end(logs)
    return model.history


def _evaluate(
    step: Step,
    data: EpochData,
    epoch: int,
    steps: int | None,
    callbacks: keras.callbacks.CallbackList,
) -> dict[str, float]:
    step.reset()
    callbacks.on_test_begin()
    iterator = data.iterator(epoch)
    logs: dict[str, Any] = {}
    done = 0
    while steps is None or done < steps:
        callbacks.on_test_batch_begin(done)
        try:
            logs = step(iterator)
        except (tf.errors.OutOfRangeError, StopIteration):
            break
        callbacks.on_test_batch_end(done, logs)
        done += step.taken
    found = {name: float(value) for name, value in logs.items()}
    callbacks.on_test_end(found)
    return found


def _check_save_freq(save_freq: Any) -> None:
    if save_freq == "epoch":
        return
    if isinstance(save_freq, bool) or not isinstance(save_freq, int):
        raise TypeError(
            "save_freq must be 'epoch' or a number of batches. Received: "
            f"save_freq={save_freq!r}"
        )
    if save_freq < 1:
        raise ValueError(f"save_freq must be at least 1. Received: {save_freq}")
