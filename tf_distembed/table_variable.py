"""The Keras variable that applies its own row optimizer.

Keras optimizers assign the gradient itself to a variable whose public
`overwrite_with_gradient` is set. `TableVariable` sets it and overrides
`assign`: what an optimizer assigns is a sparse gradient, and becomes one step
of the table's own row optimizer on the rows that the batch touched. Keras then
makes no slots for the table and leaves it out of clipping and weight decay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tf_distembed import row_handover
from tf_distembed.backends import compilation
from tf_distembed.initial_values import InitialValues
from tf_distembed.row_optimizers import RowOptimizer, write_rows

#: An optimizer, and the local variables of its method that is running.
_Call: TypeAlias = tuple[keras.optimizers.Optimizer, dict[str, Any]]


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
        for optimizer, _ in optimizer_calls():
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

    def rows(self, ids: tf.Tensor, *, distinct: bool = False) -> tf.Tensor:
        """Reads rows; `[N]` ids -> `[N, embedding_dim]`.

        The gradient is `tf.IndexedSlices` of the same ids.

        Args:
            ids: `[N]` integers.
            distinct: Whether no two of them are equal. The update of a step
                with this lookup alone then neither reads the rows again nor
                looks for repeated ids.
        """
        rows = tf.gather(self.value, ids)
        if distinct:
            row_handover.remember(self, ids, rows)
        return rows

    @tf.autograph.experimental.do_not_convert
    def assign(self, value: Any) -> Any:
        """Sets all values; from an optimizer, takes one step on some rows.

        Raises:
            ValueError: an optimizer hands over a dense gradient, or the
                strategy in use did not make this table.
        """
        calls = optimizer_calls()
        if not calls:
            return super().assign(value)
        # Eagerly, Keras has one table updated before it comes to the next:
        # the first one asked checks them all, so that none or all change.
        for table, gradient in [(self, value), *_gradients_of_tables(calls)]:
            table._check_gradient(gradient)
        gradient = tf.cast(value.values, self.dtype)
        gradient = _without_loss_scale(gradient, calls)
        self._apply_sparse_gradient(value.indices, gradient)
        return self.value

    def _check_gradient(self, gradient: Any) -> None:
        if not isinstance(gradient, tf.IndexedSlices):
            raise ValueError(
                f"Table '{self.table_name}' got a dense gradient of shape "
                f"{getattr(gradient, 'shape', None)}, expected the "
                "tf.IndexedSlices of its layer's lookup. Read a table only "
                "through its layer: not in a loss, a regularizer or a tied "
                "output, nor inside a tf.while_loop or tf.recompute_grad under "
                "the tape, and leave its gradient sparse. A table with "
                "optimizer=None may be used densely."
            )
        context = _many_replicas()
        if context is not None and not hasattr(self.value, "values"):
            raise ValueError(
                f"Table '{self.table_name}' was made outside the scope of the "
                f"{type(context.strategy).__name__} that trains it, so every "
                "replica would update one copy. Make the layer inside "
                "`with strategy.scope():`."
            )

    def _apply_sparse_gradient(
        self, ids: tf.Tensor, gradient: tf.Tensor
    ) -> None:
        args: tuple[Any, ...]
        lookup = None
        if _many_replicas() is None:
            lookup = row_handover.recall(self, ids)
        if lookup is not None:
            ids = lookup.ids
        else:
            ids, gradient = self._from_all_replicas(ids, gradient)
            ids, gradient = _sum_repeated(ids, gradient)
        optimizer = self.row_optimizer
        # Read in the replica, before the count moves on.
        rate, step = optimizer.rate_and_step(gradient.dtype)

        def update(strategy: Any, *args: Any) -> None:
            strategy.extended.update(
                self.value, optimizer.update_rows, args=args, group=False
            )

        args = (ids, gradient, rate, step)
        if lookup is not None:
            args += (lookup.rows,)
        tf.__internal__.distribute.interim.maybe_merge_call(
            update, tf.distribute.get_strategy(), *args
        )
        # Nothing else makes it wait for the checks of the ids, and a step that
        # raised is none.
        with tf.control_dependencies([ids, gradient]):
            optimizer.count_step()

    def _from_all_replicas(
        self, ids: tf.Tensor, gradient: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        context = _many_replicas()
        if context is None:
            return ids, gradient
        if isinstance(context.strategy, tf.distribute.MirroredStrategy):
            # One process holds all parts. Collectives of a changing size
            # cannot be used in a loop: TensorFlow remembers the first one's.
            return context.merge_call(_on_all_devices, args=(ids, gradient))
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


def _on_all_devices(
    strategy: tf.distribute.Strategy, *values: Any
) -> tuple[Any, ...]:
    """Each value of all replicas, one after the other, on each device."""
    parts = [strategy.experimental_local_results(value) for value in values]
    whole = []
    for device in strategy.extended.worker_devices:
        with tf.device(device):
            whole.append(tuple(tf.concat(part, axis=0) for part in parts))
    return strategy.experimental_distribute_values_from_function(
        lambda context: whole[context.replica_id_in_sync_group]
    )


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

    Shapes that depend on the ids lose rows under XLA without an error, and a
    TPU does not have them. There every place of an id carries the whole sum,
    and all places of one id write the same row.
    """
    if compilation.compiled_by_xla():
        order = tf.argsort(ids, stable=True)
        ids, gradient = tf.gather(ids, order), tf.gather(gradient, order)
        is_next = tf.cast(tf.not_equal(ids[1:], ids[:-1]), tf.int32)
        place = tf.pad(tf.cumsum(is_next), [[1, 0]])[: tf.size(ids)]
        total = tf.math.unsorted_segment_sum(gradient, place, tf.size(ids))
        return ids, tf.gather(total, place)
    return sum_of_each_id(ids, gradient)


def sum_of_each_id(
    ids: tf.Tensor, gradient: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """The distinct ids `[U]` and the sum of the rows `[U, D]` of each.

    Not under XLA, which has no shape that depends on the ids.
    """
    unique_ids, place = tf.unique(ids)
    count = tf.size(unique_ids)
    return unique_ids, tf.math.unsorted_segment_sum(gradient, place, count)


def _without_loss_scale(gradient: tf.Tensor, calls: list[_Call]) -> tf.Tensor:
    """Divides out the loss scales of the optimizers that are applying.

    Keras does not unscale what it assigns by `overwrite_with_gradient`. Of
    what else it applies, a `LossScaleOptimizer` unscales what it hands on, and
    the innermost optimizer what it is handed.
    """
    for optimizer in {id(one): one for one, _ in calls}.values():
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            scale = tf.convert_to_tensor(optimizer.dynamic_scale)
            gradient /= tf.cast(scale, gradient.dtype)
    if factor := calls[0][0].loss_scale_factor:
        gradient /= tf.cast(factor, gradient.dtype)
    return gradient


def _many_replicas() -> Any:
    """The context of the replica running, or None if it is the only one."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    return context


def optimizer_calls() -> list[_Call]:
    """The methods of Keras optimizers that are running, innermost first.

    A variable is told neither who assigns to it nor what the value means; the
    call stack is the only place that says so. It is read while a function is
    traced, not while it runs.
    """
    found: list[_Call] = []
    frame = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.optimizers.Optimizer):
            found.append((owner, frame.f_locals))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _gradients_of_tables(
    calls: list[_Call],
) -> Iterator[tuple[TableVariable, Any]]:
    """What `Optimizer.apply` was given for tables, by its argument names."""
    for _, local in calls:
        gradients = local.get("grads")
        variables = local.get("trainable_variables")
        if not isinstance(gradients, (list, tuple)) or not isinstance(
            variables, (list, tuple)
        ):
            continue
        for gradient, variable in zip(gradients, variables, strict=False):
            # Across replicas they may be values of all replicas; those reach
            # the variable one by one.
            if isinstance(variable, TableVariable) and isinstance(
                gradient, (tf.Tensor, tf.IndexedSlices)
            ):
                yield variable, gradient
