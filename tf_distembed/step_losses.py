"""Loss and metrics of a replica, such that all replicas give those of one.

Keras divides a loss by the rows of its replica and then by the number of
replicas, which is right only if all have equally many. Here the examples are
weighted so that the sum over the replicas is the sum over the examples of the
global batch divided by their number.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tf_distembed import replica_batches

_MEANS = ("sum_over_batch_size", "mean", "auto")


def check_reductions(model: keras.Model) -> None:
    """Raises for losses whose mean over replicas cannot be made exact."""
    found = _reductions(model.loss)
    if found - {*_MEANS, "sum"}:
        raise ValueError(
            "On several replicas, or with padded batches, the losses must have "
            "reduction 'sum_over_batch_size' or 'sum'. Received: "
            f"{sorted(map(str, found))}"
        )
    if "sum" in found and len(found) > 1:
        raise ValueError(
            "On several replicas, or with padded batches, all losses of a "
            f"model must have one reduction. Received: {sorted(found)}"
        )


def replica_loss(
    model: keras.Model,
    x: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    valid: tf.Tensor | None,
    training: bool,
) -> tuple[tf.Tensor, tf.Tensor]:
    """This replica's summand of the global loss, and its number of examples.

    Args:
        model: A compiled model.
        x: Its inputs.
        y: Labels.
        y_pred: Its outputs.
        sample_weight: As Keras takes it, or None.
        valid: 1 for each real row and 0 for each added one, or None.
        training: As Keras' `compute_loss` takes it.

    Returns:
        Two scalars, float32. The gradient is that of the first one.
    """
    rows = tf.cast(
        replica_batches.rows_of(replica_batches.first_input((x,))), tf.float32
    )
    count = rows if valid is None else tf.reduce_sum(valid)
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync
    if replicas > 1 or valid is not None:
        _refuse_keras_masks(y_pred)
        factor = tf.ones([])
        if "sum" not in _reductions(model.loss):
            total = sum_over_replicas(count)
            factor = tf.math.divide_no_nan(rows * replicas, total)
        each = tf.fill([tf.cast(rows, tf.int32)], factor)
        if valid is not None:
            each *= valid
        sample_weight = _times(sample_weight, each)
    loss = model.compute_loss(
        x=x,
        y=y,
        y_pred=y_pred,
        sample_weight=sample_weight,
        training=training,
    )
    return loss, count


def sum_over_replicas(value: tf.Tensor) -> tf.Tensor:
    """The sum of a tensor over all replicas, in each of them."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return value
    return context.all_reduce(tf.distribute.ReduceOp.SUM, value)


def update_metrics(
    model: keras.Model,
    x: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    valid: tf.Tensor | None,
) -> None:
    """Updates the compiled metrics with the real rows."""
    if valid is None:
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return
    # Keras passes no weights to `metrics`, only to `weighted_metrics`. Its
    # own lists are the one place where both can be had.
    compiled = model._compile_metrics
    if compiled is None:
        return
    if not compiled.built:
        compiled.build(y, y_pred)
    labels, outputs = compiled._flatten_y(y), compiled._flatten_y(y_pred)
    weights = keras.tree.flatten(_times(sample_weight, valid))
    if len(weights) < len(labels):
        weights = weights[:1] * len(labels)
    for metrics, each in (
        (compiled._flat_metrics, [valid] * len(labels)),
        (compiled._flat_weighted_metrics, weights),
    ):
        for metric, label, output, weight in zip(
            metrics, labels, outputs, each, strict=False
        ):
            if metric:
                metric.update_state(label, output, weight)


def class_weights(y: Any, class_weight: dict[int, float]) -> tf.Tensor:
    """The weight of each example's class, as Keras' `fit` takes it."""
    y = tf.convert_to_tensor(y)
    classes = tf.cast(y, tf.int64)
    if y.shape.rank and y.shape.rank > 1:
        classes = (
            tf.argmax(y, axis=-1)
            if y.shape[-1] != 1
            else tf.cast(tf.squeeze(y, -1), tf.int64)
        )
    table = tf.constant(
        [float(class_weight.get(i, 1)) for i in range(max(class_weight) + 1)]
    )
    known = tf.clip_by_value(classes, 0, len(table) - 1)
    return tf.where(known == classes, tf.gather(table, known), 1.0)


def _reductions(loss: Any) -> set[Any]:
    return {
        getattr(one, "reduction", "sum_over_batch_size")
        for one in keras.tree.flatten(loss)
        if one is not None
    }


def _times(sample_weight: Any, each: tf.Tensor) -> Any:
    """Sample weights, or weights of 1, times one number for each row."""
    if sample_weight is None:
        return each

    def times(weight: Any) -> Any:
        if weight is None:
            return each
        weight = tf.cast(weight, tf.float32)
        shape = [-1] + [1] * (weight.shape.rank - 1)
        return weight * tf.reshape(each, shape)

    return keras.tree.map_structure(times, sample_weight)


def _refuse_keras_masks(y_pred: Any) -> None:
    if any(
        getattr(one, "_keras_mask", None) is not None
        for one in keras.tree.flatten(y_pred)
    ):
        raise ValueError(
            "The model's output has a Keras mask, by which Keras divides the "
            "loss on each replica alone. On several replicas, or with padded "
            "batches, drop it (mask_zero=False) and pass sample_weight."
        )
