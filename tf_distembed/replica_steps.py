"""What one replica does in a step of training, evaluation or prediction."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tf_distembed import real_rows, replica_batches, step_losses


def train(model: keras.Model, data: Any, valid: tf.Tensor | None) -> None:
    """Takes one optimizer step and updates the means."""
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


def evaluate(model: keras.Model, data: Any, valid: tf.Tensor | None) -> None:
    """Updates the means."""
    x, y, sample_weight = replica_batches.unpack(data)
    y_pred = _call(model, x, valid, training=False)
    loss, count = step_losses.replica_loss(
        model, x, y, y_pred, sample_weight, valid, training=False
    )
    _update_means(model, x, y, y_pred, sample_weight, valid, loss, count)


def predict(model: keras.Model, data: Any, valid: tf.Tensor | None) -> Any:
    """The outputs, with those of added rows."""
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
