"""The Keras variable that applies its own row optimizer.

Keras optimizers assign the gradient itself to a variable whose public
`overwrite_with_gradient` is set. `TableVariable` sets it and overrides
`assign`: what an optimizer assigns is a sparse gradient, and becomes one step
of the table's own row optimizer on the rows that the batch touched. Keras then
makes no slots for the table and leaves it out of clipping and weight decay.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import tensorflow as tf

from tf_distembed.backends import compilation
from tf_distembed.initial_values import InitialValues
from tf_distembed.row_optimizers import RowOptimizer, write_rows


class TableVariable(keras.Variable):
    """A table `[vocabulary_size, embedding_dim]` with its own row optimizer.

    Args:
        initial: The values it starts from.
        row_optimizer: Its slots, step count and update.
        table_name: What errors call it.
        name: The variable's name.

    Raises:
        ValueError: made in a stateless scope; see `assign` for the rest.
    """

    def __init__(
        self,
        initial: InitialValues,
        row_optimizer: RowOptimizer,
        *,
        table_name: str,
        name: str = "embeddings",
    ) -> None:
        self.table_name = table_name
        self.row_optimizer = row_optimizer
        super().__init__(
            lambda shape, dtype: tf.zeros(shape, dtype),
            shape=initial.shape,
            dtype=initial.dtype,
            # Under a mixed policy, autocast would read and cast the whole
            # table at every lookup.
            autocast=False,
            name=name,
        )
        fill_from(self, initial)

    @property
    def overwrite_with_gradient(self) -> bool:
        """True; raises if the optimizer asking has a setting that breaks."""
        for optimizer in _optimizers_on_the_stack():
            if optimizer.use_ema:
                raise ValueError(
                    f"Table '{self.table_name}': the model's optimizer "
                    f"'{optimizer.name}' has use_ema=True, but no average is "
                    "kept of a table with an optimizer of its own. Turn it "
                    "off, or give the table optimizer=None."
                )
            if optimizer.gradient_accumulation_steps:
                raise ValueError(
                    f"Table '{self.table_name}': the model's optimizer "
                    f"'{optimizer.name}' has gradient_accumulation_steps="
                    f"{optimizer.gradient_accumulation_steps}, which a table "
                    "with an optimizer of its own cannot follow. Use a larger "
                    "batch, or give the table optimizer=None."
                )
        return True

    @overwrite_with_gradient.setter
    def overwrite_with_gradient(self, value: bool) -> None:
        """Ignored: Keras resets it when it adopts a variable."""

    @property
    def regularizer(self) -> None:
        return None

    @regularizer.setter
    def regularizer(self, value: Any) -> None:
        self._refuse("regularizer", value)

    @property
    def constraint(self) -> None:
        return None

    @constraint.setter
    def constraint(self, value: Any) -> None:
        self._refuse("constraint", value)

    def _refuse(self, what: str, value: Any) -> None:
        if value is not None:
            raise ValueError(
                f"Table '{self.table_name}' takes no {what}, which would read "
                "all its rows in every step. Put a penalty on the looked-up "
                f"rows instead (layer.add_loss). Received: {what}={value!r}"
            )

    def rows(self, ids: tf.Tensor) -> tf.Tensor:
        """Reads rows; `[N]` ids -> `[N, embedding_dim]`.

        The gradient is `tf.IndexedSlices` of the same ids.
        """
        return tf.gather(self.value, ids)

    @tf.autograph.experimental.do_not_convert
    def assign(self, value: Any) -> Any:
        """Sets all values; from an optimizer, takes one step on some rows.

        Raises:
            ValueError: an optimizer hands over a dense gradient, or the
                strategy in use did not make this table.
        """
        optimizers = _optimizers_on_the_stack()
        if not optimizers:
            return super().assign(value)
        if not isinstance(value, tf.IndexedSlices):
            raise ValueError(
                f"Table '{self.table_name}' got a dense gradient of shape "
                f"{getattr(value, 'shape', None)}, expected the "
                "tf.IndexedSlices of its layer's lookup. Read a table only "
                "through its layer: not in a loss, a regularizer or a tied "
                "output, nor inside a tf.while_loop or tf.recompute_grad under "
                "the tape, and leave its gradient sparse. A table with "
                "optimizer=None may be used densely."
            )
        gradient = tf.cast(value.values, self.dtype)
        gradient = _without_loss_scale(gradient, optimizers)
        self._apply_sparse_gradient(value.indices, gradient)
        return self.value

    def _apply_sparse_gradient(
        self, ids: tf.Tensor, gradient: tf.Tensor
    ) -> None:
        ids, gradient = self._from_all_replicas(ids, gradient)
        ids, gradient = _sum_repeated(ids, gradient)
        optimizer = self.row_optimizer
        # Read in the replica, before the count moves on.
        rate, step = optimizer.rate_and_step(gradient.dtype)

        def update(strategy: Any, *args: Any) -> None:
            strategy.extended.update(
                self.value, optimizer.update_rows, args=args, group=False
            )

        tf.__internal__.distribute.interim.maybe_merge_call(
            update, tf.distribute.get_strategy(), ids, gradient, rate, step
        )
        optimizer.count_step()

    def _from_all_replicas(
        self, ids: tf.Tensor, gradient: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return ids, gradient
        if not hasattr(self.value, "values"):
            raise ValueError(
                f"Table '{self.table_name}' was made outside the scope of the "
                f"{type(context.strategy).__name__} that trains it, so every "
                "replica would update one copy. Make the layer inside "
                "`with strategy.scope():`."
            )
        # TensorFlow crashes if no replica has anything to gather: one without
        # ids sends a row of id -1, which is dropped again.
        absent = tf.cast(tf.equal(tf.size(ids), 0), tf.int32)
        ids = tf.pad(ids, [[0, absent]], constant_values=-1)
        gradient = tf.pad(gradient, [[0, absent], [0, 0]])
        ids = context.all_gather(ids, axis=0)
        gradient = context.all_gather(gradient, axis=0)
        if compilation.compiled_by_xla():
            return ids, gradient
        present = tf.where(ids >= 0)[:, 0]
        return tf.gather(ids, present), tf.gather(gradient, present)


def fill_from(variable: keras.Variable, initial: InitialValues) -> None:
    """Writes the initial values, block by block, on every device.

    The variable is made with zeros first, so that no second copy of a large
    table is ever held.
    """
    with tf.init_scope():
        for start, values in initial.blocks():
            ids = tf.range(start, start + len(values))
            for part in components(variable.value):
                write_rows(part, ids, tf.constant(values))


def components(variable: Any) -> tuple[tf.Variable, ...]:
    """The variable of each device of a distributed variable, or itself."""
    return tuple(getattr(variable, "values", (variable,)))


def _sum_repeated(
    ids: tf.Tensor, gradient: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums the gradients of each id; XLA keeps the repeats, each with the sum.

    Shapes that depend on the ids lose rows under XLA without an error, so
    there every place of an id carries the whole sum, and all places of one id
    write the same row.
    """
    unique_ids, place = tf.unique(ids)
    if compilation.compiled_by_xla():
        count = tf.size(ids)
        total = tf.math.unsorted_segment_sum(gradient, place, count)
        return ids, tf.gather(total, place)
    count = tf.size(unique_ids)
    return unique_ids, tf.math.unsorted_segment_sum(gradient, place, count)


def _without_loss_scale(
    gradient: tf.Tensor, optimizers: list[keras.optimizers.Optimizer]
) -> tf.Tensor:
    """Divides out the loss scales of the optimizers that are applying.

    Keras does not unscale what it assigns by `overwrite_with_gradient`.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            scale = tf.convert_to_tensor(optimizer.dynamic_scale)
            gradient /= tf.cast(scale, gradient.dtype)
        elif optimizer.loss_scale_factor:
            gradient /= tf.cast(optimizer.loss_scale_factor, gradient.dtype)
    return gradient


def _optimizers_on_the_stack() -> list[keras.optimizers.Optimizer]:
    """The Keras optimizers whose methods are running, innermost first.

    A variable is told neither who assigns to it nor what the value means; the
    call stack is the only place that says so. It is read while a function is
    traced, not while it runs.
    """
    found: list[keras.optimizers.Optimizer] = []
    frame = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.optimizers.Optimizer) and all(
            o is not owner for o in found
        ):
            found.append(owner)
        frame = frame.f_back  # type: ignore[assignment]
    return found
