"""What an optimizer decides from gradients, decided from those of all replicas.

On several replicas Keras looks at the gradients of each of them before they are
summed, so it would clip, or skip a step, for a part of the global batch.
"""

from __future__ import annotations

import types
from typing import Any

import keras
import tensorflow as tf

from tf_distembed import step_losses
from tf_distembed.table_variable import sum_of_each_id

_CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


def agree_on_finite_gradients(optimizer: Any) -> None:
    """Makes a `LossScaleOptimizer` look at all replicas' gradients.

    Keras asks one replica whether its gradients are finite, before they are
    summed, and turns the gradients of whole tables dense for it.
    """
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return

    def check_finite(gradients: Any) -> tf.Tensor:
        bad = tf.zeros([])
        for one in gradients:
            if one is not None:
                values = (
                    one.values if isinstance(one, tf.IndexedSlices) else one
                )
                all_finite = tf.reduce_all(tf.math.is_finite(values))
                bad += 1.0 - tf.cast(all_finite, tf.float32)
        return tf.equal(step_losses.sum_over_replicas(bad), 0.0)

    optimizer.check_finite = check_finite


def clip_the_sum(optimizer: Any) -> None:
    """Makes an optimizer clip the gradients of the global batch."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if any(getattr(optimizer, name, None) for name in _CLIPPING):
        optimizer._clip_gradients = types.MethodType(_clip_sums, optimizer)


def _clip_sums(optimizer: Any, gradients: list[Any]) -> list[Any]:
    """Gradients whose sum over the replicas is the clipped sum of all."""
    clip = type(optimizer)._clip_gradients
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return clip(optimizer, gradients)
    some = [one for one in gradients if one is not None]
    sums = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, some))
    clipped = clip(
        optimizer,
        [None if one is None else _merged(next(sums)) for one in gradients],
    )
    share = 1.0 / context.num_replicas_in_sync
    return [None if one is None else _scaled(one, share) for one in clipped]


def _merged(gradient: Any) -> Any:
    """With one row for each id, since a norm is that of their sums."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy):
        # XLA knows no number of ids.
        return tf.convert_to_tensor(gradient)
    ids, rows = sum_of_each_id(gradient.indices, gradient.values)
    return tf.IndexedSlices(rows, ids, gradient.dense_shape)


def _scaled(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            gradient.values * factor, gradient.indices, gradient.dense_shape
        )
    return gradient * factor
