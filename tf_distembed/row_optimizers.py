"""From what a user calls an optimizer to a rule, slots and a learning rate.

`check_optimizer` refuses, early and by name, what a table cannot honour.
`make_optimizer` gives the Keras (or native) optimizer object in use, and
`RowOptimizer` keeps the slots and the step count of one table.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_distembed import row_rules

if TYPE_CHECKING:
    from tf_distembed.config import TableConfig

Schedule = keras.optimizers.schedules.LearningRateSchedule

_KERAS = {
    "sgd": keras.optimizers.SGD,
    "adagrad": keras.optimizers.Adagrad,
    "adam": keras.optimizers.Adam,
    "ftrl": keras.optimizers.Ftrl,
}
_KERAS_RULES: dict[type, type[row_rules.RowRule]] = {
    keras.optimizers.SGD: row_rules.Sgd,
    keras.optimizers.Adagrad: row_rules.Adagrad,
    keras.optimizers.Adam: row_rules.Adam,
    keras.optimizers.Ftrl: row_rules.Ftrl,
}
_native = tf.tpu.experimental.embedding
_NATIVE_RULES: dict[type, type[row_rules.RowRule]] = {
    _native.SGD: row_rules.Sgd,
    _native.Adagrad: row_rules.TpuAdagrad,
    _native.AdagradMomentum: row_rules.TpuAdagradMomentum,
    _native.Adam: row_rules.TpuAdam,
    _native.FTRL: row_rules.TpuFtrl,
}
_NATIVE_PREFIX = "tf.tpu.experimental.embedding."

# Settings of the two families that a row update has no place for, and the
# value at which each is switched off.
_KERAS_OFF = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
    "amsgrad": False,
}
_NATIVE_OFF = {
    "use_gradient_accumulation": True,
    "clip_weight_min": None,
    "clip_weight_max": None,
    "clip_gradient_min": None,
    "clip_gradient_max": None,
    "weight_decay_factor": None,
    "multiply_weight_decay_factor_by_learning_rate": None,
    "low_dimensional_packing_status": False,
    "lazy_adam": True,
    "allow_zero_accumulator": False,
    "slot_variable_creation_fn": None,
}


def is_native(optimizer: Any) -> bool:
    """Whether this is a `tf.tpu.experimental.embedding` optimizer."""
    return type(optimizer) in _NATIVE_RULES


def check_optimizer(optimizer: Any, where: str) -> None:
    """Raises unless `optimizer` can be a table's own (or is None).

    Raises:
        TypeError: neither a name, a config dict nor an optimizer object.
        ValueError: an unknown name, an optimizer that has no row rule, or a
            setting that a row update cannot honour.
    """
    if optimizer is None:
        return
    if isinstance(optimizer, str):
        if optimizer.lower() not in _KERAS:
            raise ValueError(
                f"{where}: a table's optimizer must be one of "
                f"{list(_KERAS)}, by name or as an object, or None. "
                f"Received: optimizer={optimizer!r}"
            )
    elif isinstance(optimizer, Mapping):
        name = str(optimizer.get("class_name", ""))
        native = {_NATIVE_PREFIX + kind.__name__ for kind in _NATIVE_RULES}
        if name.lower() not in _KERAS and name not in native:
            raise ValueError(
                f"{where}: an optimizer's config dict must have a class_name "
                f"of {[kind.__name__ for kind in _KERAS_RULES]}. "
                f"Received: class_name={optimizer.get('class_name')!r}"
            )
        settings = optimizer.get("config", {})
        if not isinstance(settings, Mapping):
            raise TypeError(
                f"{where}: an optimizer's config dict must hold a dict of its "
                f"settings under 'config'. Received: config={settings!r}"
            )
        _check_settings(settings.get, _KERAS_OFF, where, name)
    else:
        rule_of(optimizer, where)


def make_optimizer(optimizer: Any, where: str) -> Any:
    """The optimizer object in use for what a `TableConfig` holds.

    A name or config dict makes a new Keras optimizer; an object stays itself.

    Raises:
        TypeError: neither a name, a config dict nor an optimizer object.
        ValueError: what `check_optimizer` refuses, or a config dict with
            settings that its optimizer does not take.
    """
    check_optimizer(optimizer, where)
    if isinstance(optimizer, str):
        return _KERAS[optimizer.lower()]()
    if isinstance(optimizer, Mapping):
        try:
            made = deserialize(optimizer)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{where}: no optimizer can be made of the config dict "
                f"{dict(optimizer)!r}. {error}"
            ) from error
        check_optimizer(made, where)
        return made
    return optimizer


def rule_of(optimizer: Any, where: str) -> row_rules.RowRule:
    """The row rule of an optimizer object.

    Raises:
        TypeError: not an optimizer object.
        ValueError: an optimizer without a rule, or with a refused setting.
    """
    kind = type(optimizer)
    if kind in _KERAS_RULES:
        rule, off, name = _KERAS_RULES[kind], _KERAS_OFF, kind.__name__
    elif kind in _NATIVE_RULES:
        name = _NATIVE_PREFIX + kind.__name__
        rule, off = _NATIVE_RULES[kind], _NATIVE_OFF
    elif isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"{where}: no row update exists for the optimizer {kind.__name__}."
            f" A table's own optimizer is one of "
            f"{[k.__name__ for k in _KERAS_RULES]} itself, not a subclass; "
            "with optimizer=None the model's optimizer trains the table."
        )
    else:
        raise TypeError(
            f"{where}: optimizer must be a name, a Keras optimizer, its "
            "config dict, a tf.tpu.experimental.embedding optimizer or None. "
            f"Received: {optimizer!r} (of type {kind.__name__})"
        )
    _check_settings(
        lambda field, default: getattr(optimizer, field, default),
        off,
        where,
        name,
    )
    settings = {
        field.name: getattr(optimizer, field.name)
        for field in dataclasses.fields(rule)
        if hasattr(optimizer, field.name)
    }
    if rule is row_rules.Sgd and is_native(optimizer):
        settings = {}
    return rule(**settings)


def serialize(optimizer: Any, where: str) -> Any:
    """A form of `optimizer` that Keras can write as JSON.

    Raises:
        ValueError: a native optimizer whose learning rate is a callable.
    """
    if optimizer is None or isinstance(optimizer, str):
        return optimizer
    if isinstance(optimizer, Mapping):
        return dict(optimizer)
    if not is_native(optimizer):
        return keras.optimizers.serialize(optimizer)
    if callable(optimizer.learning_rate):
        raise ValueError(
            f"{where}: an optimizer whose learning_rate is a callable cannot "
            "be written to a config. Use a float, or a Keras optimizer with a "
            "LearningRateSchedule."
        )
    settings = {
        field.name: getattr(optimizer, field.name)
        for field in dataclasses.fields(rule_of(optimizer, where))
        if hasattr(optimizer, field.name)
    }
    settings["learning_rate"] = float(optimizer.learning_rate)
    name = _NATIVE_PREFIX + type(optimizer).__name__
    return {"class_name": name, "config": settings}


def deserialize(config: Any) -> Any:
    """The optimizer that `serialize` was given."""
    if not isinstance(config, Mapping):
        return config
    name = config["class_name"]
    if name.startswith(_NATIVE_PREFIX):
        kind = getattr(_native, name.removeprefix(_NATIVE_PREFIX))
        return kind(**config.get("config", {}))
    if name.lower() in _KERAS and "module" not in config:
        return _KERAS[name.lower()].from_config(dict(config.get("config", {})))
    return keras.optimizers.deserialize(dict(config))


def as_given(optimizer: Any) -> Any:
    """What a user would write for an optimizer in use, learning rate included.

    A `RowOptimizer` stands for a native optimizer; anything else is itself.
    """
    if not isinstance(optimizer, RowOptimizer):
        return optimizer
    native: Any = optimizer.native
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable) and (
        float(rate.numpy()) != native.learning_rate
    ):
        native = copy.copy(native)
        native.learning_rate = float(rate.numpy())
    return native


class LearningRate:
    """Reads the learning rate of another optimizer, whenever asked.

    The user's object stays the one place to change it: a float there is a
    variable, which a traced step reads anew; a schedule advances with the
    steps of the table, not with those of an optimizer that is never applied.
    """

    def __init__(self, source: keras.optimizers.Optimizer) -> None:
        self.source = source
        self.row_optimizer: RowOptimizer | None = None

    def __call__(self) -> Any:
        # `source.learning_rate` would call a schedule with the source's own
        # step count, which stays 0; Keras has no public way to ask for it.
        rate = self.source._learning_rate
        if isinstance(rate, Schedule):
            assert self.row_optimizer is not None
            return rate(self.row_optimizer.iterations)
        if isinstance(rate, keras.Variable):
            return rate.value
        return rate()


class RowOptimizer(keras.optimizers.Optimizer):
    """The slots and the step count of one table, and its update of rows.

    A Keras optimizer, so that its variables are made and found as those of
    any optimizer; `apply` is never called on it. What it holds is written to
    files by the layer, by table and slot name.
    """

    def __init__(self, optimizer: Any, table_name: str) -> None:
        rule = rule_of(optimizer, f"Table '{table_name}'")
        native = optimizer if is_native(optimizer) else None
        rate: Any = LearningRate(optimizer)
        if native is not None:
            rate = native.learning_rate
            rate = rate if callable(rate) else float(rate)
        super().__init__(learning_rate=rate, name=f"row_optimizer_{table_name}")
        if isinstance(rate, LearningRate):
            rate.row_optimizer = self
        self.rule = rule
        self.native = native
        self.slots: dict[str, keras.Variable] = {}

    def in_use(self) -> Any:
        """The object whose `learning_rate` may be reassigned.

        No property: Keras walks those when it loads, from this object to
        itself without end.
        """
        return self if self.native is not None else self._learning_rate.source

    def make_slots(self, table: keras.Variable) -> None:
        """Makes the slots of `table`, beside it and of its shape."""
        strategy = tf.distribute.get_strategy()
        for name, first in self.rule.slots.items():
            with _colocated(strategy, table.value):
                self.slots[name] = self.add_variable(
                    tuple(table.shape),
                    initializer=keras.initializers.Constant(first),
                    dtype=table.dtype,
                    name=name,
                )

    def rate_and_step(self, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        """The learning rate and the number of the step to be taken."""
        rate = tf.cast(tf.convert_to_tensor(self.learning_rate), dtype)
        return rate, tf.convert_to_tensor(self.iterations.value) + 1

    def count_step(self) -> None:
        """Advances the step count.

        `keras.Variable.assign_add` is a read and a write; this is one.
        """
        self.iterations.value.assign_add(1)

    def update_rows(
        self,
        table: tf.Variable,
        ids: tf.Tensor,
        gradient: tf.Tensor,
        learning_rate: tf.Tensor,
        step: tf.Tensor,
        rows: tf.Tensor | None = None,
    ) -> None:
        """Takes one step on the rows `ids` of `table`.

        Args:
            table: The table's variable on the device being updated.
            ids: `[U]`. An id may repeat if all its gradients are equal, which
                writes the same row again.
            gradient: `[U, D]`, already summed over all uses of each id.
            learning_rate: Scalar of the table's dtype.
            step: Scalar integer, 1 at the first step.
            rows: `[U, D]`, what `table` holds at `ids`, or None to read it.
        """
        slots = {name: slot.value for name, slot in self.slots.items()}
        if rows is None:
            rows = tf.gather(table, ids)
        old = {name: tf.gather(slot, ids) for name, slot in slots.items()}
        rows, new = self.rule.update(rows, gradient, old, step, learning_rate)
        for name, slot in slots.items():
            write_rows(slot, ids, new[name])
        write_rows(table, ids, rows)

    def save_own_variables(self, store: Any) -> None:
        """Writes nothing: the layer writes this state by table and slot."""

    def load_own_variables(self, store: Any) -> None:
        """Reads nothing: the layer reads this state by table and slot."""


def stack_key(table: TableConfig, optimizer: Any) -> Any:
    """What must be equal of the optimizers of two tables to share a stack.

    Equal names and configs are equal; a given object equals only itself,
    since its learning rate may be reassigned. Tables that have the layer's
    optimizer have an equal one.

    Args:
        table: Says how the optimizer was given.
        optimizer: The object in use, or None.
    """
    if optimizer is None or not table.trainable:
        return (table.trainable, None)
    if table.optimizer is None:
        return "the layer's"
    if isinstance(table.optimizer, (str, Mapping)):
        rule = rule_of(optimizer, f"Table '{table.name}'")
        settings = serialize(table.optimizer, "")
        if isinstance(settings, Mapping):
            # Keras numbers the names of optimizers that are made alike.
            config = dict(settings.get("config", {}))
            config.pop("name", None)
            settings = {**settings, "config": config}
        return (rule, repr(settings).lower())
    return ("object", id(optimizer))


def write_rows(variable: tf.Variable, ids: tf.Tensor, rows: tf.Tensor) -> None:
    """Overwrites rows of one (not distributed) variable, in place."""
    tf.raw_ops.ResourceScatterUpdate(
        resource=variable.handle, indices=ids, updates=rows
    )


def _colocated(
    strategy: tf.distribute.Strategy, variable: Any
) -> contextlib.AbstractContextManager:
    if tf.distribute.has_strategy():
        return strategy.extended.colocate_vars_with(variable)
    return contextlib.nullcontext()


def _check_settings(
    read: Callable[..., Any],
    off: Mapping[str, Any],
    where: str,
    name: str,
) -> None:
    for field, default in off.items():
        value = read(field, default)
        # 0 switches a setting off as None does, except a bound of 0.
        is_off = not value and not default and not field.startswith("clip_")
        if value != default and not is_off:
            raise ValueError(
                f"{where}: the optimizer {name} has {field}={value!r}, which "
                "an update of single rows cannot honour. Leave it at "
                f"{default!r}; settings of the model's own optimizer do not "
                "reach tables that have their own."
            )
