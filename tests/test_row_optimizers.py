"""Which optimizers a table may have, and how they train it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests import dense_reference as ref
from tests.conformance.reference import Reference

K = keras.optimizers
native = tf.tpu.experimental.embedding
Schedule = K.schedules.ExponentialDecay


def eagerly(step: Callable) -> Callable:
    return step


# -- Keras optimizers train as Keras does ------------------------------------

KERAS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: K.SGD(0.2),
    "momentum": lambda: K.SGD(0.1, momentum=0.9),
    "nesterov": lambda: K.SGD(0.1, momentum=0.8, nesterov=True),
    "adagrad": lambda: K.Adagrad(0.3),
    "adagrad_settings": lambda: K.Adagrad(
        0.1, initial_accumulator_value=0.5, epsilon=1e-2
    ),
    "adam": lambda: K.Adam(0.05),
    "adam_settings": lambda: K.Adam(0.1, beta_1=0.5, beta_2=0.9, epsilon=0.1),
    "ftrl": lambda: K.Ftrl(0.1),
    "ftrl_settings": lambda: K.Ftrl(
        0.2,
        learning_rate_power=-0.4,
        initial_accumulator_value=0.2,
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.02,
        l2_shrinkage_regularization_strength=0.03,
        beta=0.3,
    ),
    "schedule": lambda: K.Adagrad(Schedule(0.5, 1, 0.5)),
    "adam_schedule": lambda: K.Adam(Schedule(0.1, 2, 0.3, staircase=True)),
    "callable_rate": lambda: K.SGD(learning_rate=lambda: 0.2),
}


@pytest.mark.parametrize("name", KERAS)
def test_a_keras_optimizer_trains_as_keras_on_the_touched_rows(
    name: str,
) -> None:
    layer = ref.make_layer(
        ref.RAGGED_FEATURES, {"item": KERAS[name](), "user": KERAS[name]()}
    )
    ref.train(layer, ref.RAGGED_FEATURES, wrap=eagerly)
    reference = ref.DenseReference(
        ref.RAGGED_FEATURES, {"item": KERAS[name](), "user": KERAS[name]()}
    )
    ref.assert_close(ref.state_of(layer), reference.run().state, atol=5e-6)


@pytest.mark.parametrize(
    "spelling, kind",
    [
        ("sgd", K.SGD),
        ("SGD", K.SGD),
        ("adagrad", K.Adagrad),
        ("Adagrad", K.Adagrad),
        ("adam", K.Adam),
        ("ADAM", K.Adam),
        ("ftrl", K.Ftrl),
        ("Ftrl", K.Ftrl),
        ({"class_name": "Adagrad", "config": {"learning_rate": 0.2}}, None),
        ({"class_name": "adam", "config": {"beta_1": 0.5}}, None),
        ({"class_name": "SGD"}, K.SGD),
        (K.serialize(K.Adam(0.1, beta_2=0.9)), None),
    ],
    ids=str,
)
def test_a_name_or_a_config_makes_keras_optimizer(
    spelling: Any, kind: Any
) -> None:
    made = kind or (lambda: K.get(dict(spelling)))
    layer = ref.make_layer(optimizers=spelling)
    in_use = layer.table_optimizers
    assert in_use["item"] is not in_use["user"]
    assert type(in_use["item"]) is type(made())
    ref.train(layer, wrap=eagerly, steps=[0, 1])
    reference = ref.DenseReference(
        ref.DENSE_FEATURES, {"item": made(), "user": made()}
    )
    # FTRL divides a small difference of powers by a rate of 0.001.
    state = reference.run([0, 1]).state
    ref.assert_close(ref.state_of(layer), state, atol=5e-5)


def test_one_object_may_serve_several_tables_and_the_model() -> None:
    """Each table has slots and a step count of its own."""
    one = K.Adam(0.05)
    layer = ref.make_layer(optimizers=one)
    assert layer.table_optimizers == {"item": one, "user": one}
    ref.train(layer, optimizer=one, wrap=eagerly)
    reference = ref.DenseReference(
        ref.DENSE_FEATURES,
        {"item": K.Adam(0.05), "user": K.Adam(0.05)},
        K.Adam(0.05),
    )
    ref.assert_close(ref.state_of(layer), reference.run().state)


# -- Lazily, by hand ---------------------------------------------------------

IDS = [[[1, 3], [3, 3]], [[0, 3], [0, 5]], [[1, 1], [5, 2]]]
COEFFICIENTS = np.array([[1.0, -0.5, 0.25], [0.5, 2.0, -1.0]], np.float32)


def _linear_run(
    optimizer: Any, wrap: Callable = eagerly
) -> tuple[np.ndarray, ref.State]:
    """Three steps of a linear loss: the table before, and the state after."""
    table = tde.TableConfig(
        "t",
        6,
        3,
        combiner="sum",
        optimizer=optimizer,
        initializer=np.arange(1, 19, dtype=np.float32).reshape(6, 3) / 8,
    )
    layer = tde.DistributedEmbedding(tde.FeatureConfig("f", table))
    before = ref.state_of(layer)["t"]["values"]
    variables = layer.trainable_variables
    model_optimizer = K.SGD()
    model_optimizer.build(variables)

    def step(ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            output = layer(ids, training=True)
            loss = tf.reduce_sum(output * COEFFICIENTS)
        model_optimizer.apply(tape.gradient(loss, variables), variables)

    run = wrap(step)
    for ids in IDS:
        run(tf.constant(ids, tf.int64))
    return before, ref.state_of(layer)


def _linear_gradients() -> list[dict[int, np.ndarray]]:
    """For each step {touched row: its summed gradient}."""
    steps = []
    for ids in IDS:
        found: dict[int, np.ndarray] = {}
        for example, bag in enumerate(ids):
            for row in bag:
                found[row] = found.get(row, 0) + COEFFICIENTS[example]
        steps.append(found)
    return steps


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_neither_decays_nor_moves_untouched_rows(
    nesterov: bool,
) -> None:
    rate, momentum = 0.1, 0.9
    values, state = _linear_run(K.SGD(rate, momentum, nesterov=nesterov))
    velocity = np.zeros_like(values)
    for gradients in _linear_gradients():
        for row, gradient in gradients.items():
            move = velocity[row] = momentum * velocity[row] - rate * gradient
            if nesterov:
                move = momentum * velocity[row] - rate * gradient
            values[row] += move
    np.testing.assert_allclose(state["t"]["values"], values, 1e-5)
    np.testing.assert_allclose(state["t"]["momentum"], velocity, 1e-5)
    assert state["t"]["step"] == 3


NATIVE: dict[str, tuple[Any, str, Mapping[str, Any], Mapping[str, float]]] = {
    "sgd": (lambda rate: native.SGD(rate), "sgd", {}, {}),
    "adagrad": (
        lambda rate: native.Adagrad(rate, initial_accumulator_value=0.2),
        "native_adagrad",
        {},
        {"accumulator": 0.2},
    ),
    "adagrad_momentum": (
        lambda rate: native.AdagradMomentum(
            rate, 0.8, use_nesterov=True, exponent=3.0, beta2=0.9, epsilon=1e-3
        ),
        "native_adagrad_momentum",
        {
            "momentum": 0.8,
            "use_nesterov": True,
            "exponent": 3.0,
            "beta2": 0.9,
            "epsilon": 1e-3,
        },
        {"accumulator": 0.0, "momentum": 0.0},
    ),
    "adam": (
        lambda rate: native.Adam(rate, 0.8, 0.9, 1e-2),
        "native_adam",
        {
            "beta_1": 0.8,
            "beta_2": 0.9,
            "epsilon": 1e-2,
            "sum_inside_sqrt": True,
        },
        {"momentum": 0.0, "velocity": 0.0},
    ),
    "adam_sum_outside": (
        lambda rate: native.Adam(rate, 0.8, 0.9, 1e-2, sum_inside_sqrt=False),
        "native_adam",
        {
            "beta_1": 0.8,
            "beta_2": 0.9,
            "epsilon": 1e-2,
            "sum_inside_sqrt": False,
        },
        {"momentum": 0.0, "velocity": 0.0},
    ),
    "ftrl": (
        lambda rate: native.FTRL(rate, -0.4, 0.05, 0.02, 0.3, 0.2),
        "native_ftrl",
        {
            "learning_rate_power": -0.4,
            "l1_regularization_strength": 0.05,
            "l2_regularization_strength": 0.02,
            "beta": 0.3,
            "multiply_linear_by_learning_rate": False,
        },
        {"accumulator": 0.2, "linear": 0.0},
    ),
    "ftrl_multiplied": (
        lambda rate: native.FTRL(rate, multiply_linear_by_learning_rate=True),
        "native_ftrl",
        {
            "learning_rate_power": -0.5,
            "l1_regularization_strength": 0.0,
            "l2_regularization_strength": 0.0,
            "beta": 0.0,
            "multiply_linear_by_learning_rate": True,
        },
        {"accumulator": 0.1, "linear": 0.0},
    ),
}


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_optimizer_keeps_its_own_formula(name: str) -> None:
    make, formula, settings, first = NATIVE[name]
    before, state = _linear_run(make(0.2))
    values = before.astype(np.float64)
    slots = {slot: np.full((6, 3), value) for slot, value in first.items()}
    for t, gradients in enumerate(_linear_gradients(), 1):
        rows = sorted(gradients)
        values[rows], new = getattr(Reference({}), formula)(
            values[rows],
            {slot: value[rows] for slot, value in slots.items()},
            np.array([gradients[row] for row in rows]),
            t,
            0.2,
            **settings,
        )
        for slot, value in new.items():
            slots[slot][rows] = value
    expected = {"t": {"values": values, **slots, "step": np.array(3)}}
    ref.assert_close(state, expected, atol=1e-5)


# -- Learning rates ----------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [K.SGD, K.Adagrad, K.Adam, K.Ftrl, native.SGD, native.Adagrad, native.Adam],
)
def test_a_rate_is_reassigned_between_steps_of_one_trace(make: Any) -> None:
    """Rate 0 moves nothing; the steps before and after it do."""
    table = tde.TableConfig("t", 6, 3, optimizer=make(0.1))
    layer = tde.DistributedEmbedding(tde.FeatureConfig("f", table))
    variables = layer.trainable_variables
    optimizer = K.SGD()
    optimizer.build(variables)
    traces = []

    @tf.function
    def step(ids: tf.Tensor) -> None:
        traces.append(ids)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids, training=True) ** 2)
        optimizer.apply(tape.gradient(loss, variables), variables)

    def moved() -> float:
        before = ref.state_of(layer)["t"]["values"]
        step(tf.constant([1, 2]))
        return float(np.abs(ref.state_of(layer)["t"]["values"] - before).max())

    in_use = layer.table_optimizers["t"]
    np.testing.assert_allclose(in_use.learning_rate, 0.1)
    assert moved() > 1e-4
    if make is not K.Ftrl:  # whose formula divides by the rate
        in_use.learning_rate = 0.0
        assert moved() == 0
    in_use.learning_rate = 0.5
    np.testing.assert_allclose(layer.table_optimizers["t"].learning_rate, 0.5)
    assert moved() > 1e-4
    assert len(traces) == 1


def test_a_reassigned_rate_trains_as_keras() -> None:
    layer = ref.make_layer(optimizers={"item": K.Adam(0.1), "user": "sgd"})
    step = ref.make_step(layer, ref.make_head(), K.SGD(0.1))
    reference = ref.DenseReference(
        ref.DENSE_FEATURES, {"item": K.Adam(0.1), "user": K.SGD()}
    )
    for number, rate in enumerate([0.1, 0.5, 0.01]):
        layer.table_optimizers["item"].learning_rate = rate
        reference.optimizers["item"].learning_rate = rate
        step(*ref.batch_of(ref.DENSE_FEATURES, number))
        reference.step(number)
    ref.assert_close(ref.state_of(layer), reference.state)


def test_a_schedule_advances_with_the_steps_of_its_table() -> None:
    """Also in steps without an id of the table, and not with the model's."""
    one = K.SGD(Schedule(1.0, 1, 0.5))
    user = tde.TableConfig("user", 4, 2, optimizer=one, initializer="zeros")
    item = tde.TableConfig("item", 4, 2, optimizer=one, initializer="zeros")
    layer = tde.DistributedEmbedding(
        {
            "user": tde.FeatureConfig("user", user),
            "item": tde.FeatureConfig("item", item),
        }
    )
    variables = layer.trainable_variables
    optimizer = K.SGD()
    optimizer.build(variables)

    def step(users: list, items: list) -> None:
        with tf.GradientTape() as tape:
            outputs = layer(
                {"user": ref.ragged(users), "item": ref.ragged(items)}
            )
            loss = tf.reduce_sum(outputs["user"]) + tf.reduce_sum(
                outputs["item"]
            )
        optimizer.apply(tape.gradient(loss, variables), variables)

    step([[0]], [[]])
    step([[]], [[1]])
    step([[2]], [[2]])
    tables = {k: v.numpy() for k, v in layer.get_embedding_tables().items()}
    np.testing.assert_allclose(tables["user"][:, 0], [-1.0, 0, -0.25, 0])
    np.testing.assert_allclose(tables["item"][:, 0], [0, -0.5, -0.25, 0])
    assert int(one.iterations) == 0


def test_a_schedule_starts_again_with_the_table() -> None:
    layer = ref.make_layer(optimizers=K.SGD(Schedule(1.0, 1, 0.5)))
    ref.train(layer, wrap=eagerly, steps=[0, 1])
    assert ref.state_of(layer)["item"]["step"] == 2
    values = {name: table.values for name, table in ref.TABLES.items()}
    layer.set_embedding_tables(values, reset_slots=True)
    ref.train(layer, wrap=eagerly, steps=[0])
    reference = ref.DenseReference(
        ref.DENSE_FEATURES,
        {"item": K.SGD(Schedule(1.0, 1, 0.5)), "user": K.SGD(1.0)},
    )
    ref.assert_close(ref.state_of(layer), reference.run([0]).state)


def test_a_schedule_is_not_reassigned_in_silence() -> None:
    layer = ref.make_layer(optimizers=K.SGD(Schedule(1.0, 1, 0.5)))
    with pytest.raises(TypeError, match="learning rate is not settable"):
        layer.table_optimizers["item"].learning_rate = 0.5


def test_a_native_rate_may_be_a_callable() -> None:
    """Called whenever a step is traced; a variable in it is read anew."""
    rate = tf.Variable(0.5)
    before, state = _linear_run(native.SGD(lambda: rate), tf.function)
    moved = (state["t"]["values"] - before)[2]
    np.testing.assert_allclose(moved, -0.5 * COEFFICIENTS[1], atol=1e-6)


# -- What the layer says of them ---------------------------------------------


def test_table_optimizers_are_those_in_use() -> None:
    own = K.Adagrad(0.3)
    layer = ref.make_layer(optimizers={"item": own, "user": None})
    assert dict(layer.table_optimizers) == {"item": own}
    with pytest.raises(TypeError):
        layer.table_optimizers["user"] = K.SGD()


def test_the_layers_optimizer_fills_in_for_none() -> None:
    for given in ("adam", K.Adam(), K.serialize(K.Adam())):
        layer = ref.make_layer(
            optimizers={"item": K.SGD(0.1), "user": None}, optimizer=given
        )
        ref.train(layer, wrap=eagerly, steps=[0, 1])
        reference = ref.DenseReference(
            ref.DENSE_FEATURES, {"item": K.SGD(0.1), "user": K.Adam()}
        )
        ref.assert_close(ref.state_of(layer), reference.run([0, 1]).state)
        if isinstance(given, K.Optimizer):
            assert layer.table_optimizers["user"] is given


def test_a_rate_given_to_one_table_reaches_no_other() -> None:
    layer = ref.make_layer(optimizers="adam")
    layer.table_optimizers["item"].learning_rate = 0.5
    np.testing.assert_allclose(
        layer.table_optimizers["user"].learning_rate, 0.001
    )


# -- Refused, by name --------------------------------------------------------


def _table(optimizer: Any) -> None:
    tde.TableConfig("t", 4, 2, optimizer=optimizer)


def _layer(optimizer: Any) -> None:
    table = tde.TableConfig("t", 4, 2, optimizer=None)
    tde.DistributedEmbedding(tde.FeatureConfig("f", table), optimizer=optimizer)


def _late(optimizer: Any) -> None:
    """Changed after the configuration was made and checked."""
    table = tde.TableConfig("t", 4, 2)
    table.optimizer = optimizer
    tde.DistributedEmbedding(tde.FeatureConfig("f", table))


def _other_keras_optimizers() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for name, kind in vars(K).items():
        if not inspect.isclass(kind) or not issubclass(kind, K.Optimizer):
            continue
        if kind in (K.SGD, K.Adagrad, K.Adam, K.Ftrl):
            continue
        if name == "LossScaleOptimizer":
            found[name] = lambda: K.LossScaleOptimizer(K.SGD())
        elif name == "MultiOptimizer":
            found[name] = lambda: K.MultiOptimizer(lambda variable: K.SGD())
        elif name == "Optimizer":
            found[name] = lambda: K.Optimizer(0.1)
        else:
            found[name] = kind
    assert {"AdamW", "Lion", "Nadam", "RMSprop"} <= set(found)
    return found


@pytest.mark.parametrize("name", _other_keras_optimizers())
def test_every_other_keras_optimizer_is_refused(name: str) -> None:
    make = _other_keras_optimizers()[name]
    with pytest.raises(ValueError, match=rf"'t'.*\b{name}\b"):
        _table(make())


class MyAdam(K.Adam):
    """A subclass may compute anything; only the name is Adam's."""


REFUSED_KERAS = {
    "weight_decay": (K.SGD, {"weight_decay": 0.1}),
    "clipnorm": (K.Adam, {"clipnorm": 1.0}),
    "global_clipnorm": (K.Adagrad, {"global_clipnorm": 1.0}),
    "clipvalue": (K.Ftrl, {"clipvalue": 0.5}),
    "use_ema": (K.SGD, {"use_ema": True}),
    "loss_scale_factor": (K.Adam, {"loss_scale_factor": 8.0}),
    "gradient_accumulation_steps": (
        K.Adam,
        {"gradient_accumulation_steps": 2},
    ),
    "amsgrad": (K.Adam, {"amsgrad": True}),
}


@pytest.mark.parametrize("place", [_table, _layer, _late])
@pytest.mark.parametrize("setting", REFUSED_KERAS)
def test_a_setting_that_rows_cannot_honour_is_refused(
    setting: str, place: Callable
) -> None:
    kind, settings = REFUSED_KERAS[setting]
    value = settings[setting]
    match = rf"{kind.__name__} has {setting}={value!r}"
    with pytest.raises(ValueError, match=match):
        place(kind(**settings))
    with pytest.raises(ValueError, match=rf"{setting}={value!r}"):
        place({"class_name": kind.__name__, "config": settings})
    with pytest.raises(ValueError, match=rf"{setting}={value!r}"):
        place(K.serialize(kind(**settings)))


REFUSED_NATIVE = {
    "use_gradient_accumulation": False,
    "clip_weight_min": -1.0,
    "clip_weight_max": 0.0,
    "weight_decay_factor": 0.1,
    "low_dimensional_packing_status": True,
    "clipvalue": 1.0,
    "slot_variable_creation_fn": lambda *arguments: None,
    "lazy_adam": False,
    "allow_zero_accumulator": True,
}


@pytest.mark.parametrize("setting", REFUSED_NATIVE)
def test_a_native_setting_that_rows_cannot_honour_is_refused(
    setting: str,
) -> None:
    kinds = [
        kind
        for kind in (
            native.SGD,
            native.Adagrad,
            native.AdagradMomentum,
            native.Adam,
            native.FTRL,
        )
        if setting in inspect.signature(kind).parameters
    ]
    assert kinds
    found = "clip_gradient" if setting == "clipvalue" else setting
    for kind in kinds:
        match = rf"'t'.*embedding\.{kind.__name__} has {found}"
        with pytest.raises(ValueError, match=match):
            _table(kind(**{setting: REFUSED_NATIVE[setting]}))


@pytest.mark.parametrize("place", [_table, _layer, _late])
def test_another_name_or_class_is_refused(place: Callable) -> None:
    for name in ("rmsprop", "adamw", "", "Adam "):
        with pytest.raises(ValueError, match=f"optimizer='{name}'"):
            place(name)
    with pytest.raises(ValueError, match="class_name='RMSprop'"):
        place({"class_name": "RMSprop", "config": {}})
    with pytest.raises(ValueError, match="MyAdam"):
        place(MyAdam())


@pytest.mark.parametrize("place", [_table, _layer, _late])
@pytest.mark.parametrize("given", [3, 0.1, K.Adam, lambda: None, [], True])
def test_what_is_no_optimizer_is_a_type_error(
    given: Any, place: Callable
) -> None:
    with pytest.raises(TypeError, match=r"optimizer must be .*Received"):
        place(given)


@pytest.mark.parametrize("place", [_table, _layer, _late])
@pytest.mark.parametrize("config", [3, None, [("learning_rate", 0.1)]])
def test_a_config_dict_without_a_dict_of_settings_is_a_type_error(
    config: Any, place: Callable
) -> None:
    match = r"must hold a dict of its settings under 'config'. Received: config"
    with pytest.raises(TypeError, match=match):
        place({"class_name": "Adam", "config": config})


_NATIVE_SGD = "tf.tpu.experimental.embedding.SGD"


@pytest.mark.parametrize(
    "config, named",
    [
        ({"class_name": "Adam", "config": {"learning_rte": 0.1}}, "rte"),
        ({**K.serialize(K.SGD()), "config": {"beta": 0.1}}, "beta"),
        ({"class_name": "SGD", "config": {"learning_rate": "fast"}}, "fast"),
        ({"class_name": "SGD", "config": {"momentum": 5.0}}, "momentum"),
        ({"class_name": _NATIVE_SGD, "config": {"momentum": 0.5}}, "momentum"),
    ],
    ids=str,
)
def test_a_setting_that_its_optimizer_does_not_take_is_named(
    config: dict[str, Any], named: str
) -> None:
    """With the table; Keras' own message does not know of tables."""
    match = rf"^Table 't': no optimizer can be made of .*\}}\. .*{named}"
    tables = [
        tde.TableConfig("t", 4, 2, optimizer=config),
        tde.TableConfig("t", 4, 2, optimizer=None),
    ]
    for table, default in zip(tables, [None, config], strict=True):
        with pytest.raises(ValueError, match=match):
            tde.DistributedEmbedding(
                tde.FeatureConfig("f", table), optimizer=default
            )


def test_a_native_config_dict_may_leave_its_settings_out() -> None:
    layer = ref.make_layer(optimizers={"class_name": _NATIVE_SGD})
    rate = layer.table_optimizers["item"].learning_rate
    np.testing.assert_allclose(float(rate), native.SGD().learning_rate)


def test_a_native_rate_that_no_config_can_hold_is_refused() -> None:
    table = tde.TableConfig("t", 4, 2, optimizer=native.SGD(lambda: 0.1))
    match = "'t': an optimizer whose learning_rate is a callable cannot"
    with pytest.raises(ValueError, match=match):
        table.get_config()
    layer = tde.DistributedEmbedding(tde.FeatureConfig("f", table))
    with pytest.raises(ValueError, match="An optimizer of this layer: an"):
        layer.get_config()


def test_settings_that_are_switched_off_are_accepted() -> None:
    _table(K.SGD(weight_decay=0.0))
    _table(K.Adam(clipnorm=None, use_ema=False))
    _table({"class_name": "adam", "config": {"weight_decay": None}})
    _table(native.Adam(weight_decay_factor=0.0, lazy_adam=True))
