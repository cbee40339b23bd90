"""Options of Keras under the step helpers: right, or refused.

The rows of the table in docs/training.md. "Own" are tables with an optimizer
of their own, "the model's" those without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests import training_setup as setup

K = keras.optimizers
GLOBAL = 16
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def _float32_afterwards() -> Iterator[None]:
    yield
    keras.config.set_dtype_policy("float32")


def data(
    rows: int = GLOBAL, kind: str = "ragged", batch: int = GLOBAL
) -> tf.data.Dataset:
    return setup.dataset(rows, batch, kind, drop_remainder=False)


def make(
    optimizer: Any,
    strategy: tf.distribute.Strategy,
    own: bool = True,
    **settings: Any,
) -> setup.Model:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layer = setup.layer(GLOBAL)
        if not own:
            layer = setup.layer(GLOBAL, lambda: None, user_optimizer=None)
        model = setup.Model(layer)
        settings = {"loss": "mse", "jit_compile": False} | settings
        # The optimizer belongs to the strategy that makes its variables.
        model.compile(optimizer(), **settings)
    return model


def steps(model: setup.Model, strategy: Any, batches: Any) -> dict[str, Any]:
    step = tde.make_train_step(model, strategy=strategy)
    for batch in tde.distribute_dataset(batches, strategy):
        logs = step(batch)
    return {"loss": float(logs["loss"])} | setup.model_state(model)


@functools.cache
def tables_of_plain_sgd() -> dict[str, np.ndarray]:
    strategy = tf.distribute.get_strategy()
    model = make(lambda: K.SGD(0.1), strategy)
    steps(model, strategy, data())
    return setup.state(model.embedding)


NOT_FOR_OWN_TABLES: dict[str, Callable[[], Any]] = {
    "dynamic_loss_scale": lambda: K.LossScaleOptimizer(K.SGD(0.1)),
    "loss_scale_factor": lambda: K.SGD(0.1, loss_scale_factor=64.0),
    "clipnorm": lambda: K.SGD(0.1, clipnorm=0.01),
    "global_clipnorm": lambda: K.SGD(0.1, global_clipnorm=0.01),
    "clipvalue": lambda: K.SGD(0.1, clipvalue=0.001),
    "weight_decay": lambda: K.SGD(0.1, weight_decay=0.1),
}


@pytest.mark.parametrize(
    "strategy,name",
    [
        ("default", "dynamic_loss_scale"),
        ("default", "weight_decay"),
        *(
            pytest.param(strategy, name, marks=SLOW)
            for strategy, names in (
                (
                    "default",
                    (
                        "loss_scale_factor",
                        "clipnorm",
                        "global_clipnorm",
                        "clipvalue",
                    ),
                ),
                (
                    "mirrored",
                    ("dynamic_loss_scale", "global_clipnorm", "weight_decay"),
                ),
            )
            for name in names
        ),
    ],
)
def test_own_tables_move_as_without_the_option(
    mirrored: Any, strategy: str, name: str
) -> None:
    with setup.under(strategy, mirrored) as made:
        model = make(NOT_FOR_OWN_TABLES[name], made)
        steps(model, made, data())
        got = setup.state(model.embedding)
    setup.assert_close(got, tables_of_plain_sgd())


@SLOW
def test_tables_on_sparsecores_are_not_clipped_and_not_decayed() -> None:
    with tde.testing.sparsecore_emulator(1, 4) as strategy:
        for optimizer in (
            lambda: K.SGD(0.1, clipnorm=0.01),
            lambda: K.SGD(0.1, weight_decay=0.1, global_clipnorm=0.01),
        ):
            model = make(optimizer, strategy)
            steps(model, strategy, data())
            got = setup.state(model.embedding)
            setup.assert_close(got, tables_of_plain_sgd())


REFUSED_BY_SPARSECORES: dict[str, Callable[[], Any]] = {
    "a dynamic loss scale": lambda: K.LossScaleOptimizer(K.SGD(0.1)),
    "loss_scale_factor": lambda: K.SGD(0.1, loss_scale_factor=64.0),
    "use_ema": lambda: K.SGD(0.1, use_ema=True),
    "gradient_accumulation_steps": lambda: K.SGD(
        0.1, gradient_accumulation_steps=2
    ),
}


@SLOW
def test_tables_on_sparsecores_refuse_what_cannot_reach_them() -> None:
    with tde.testing.sparsecore_emulator(1, 4) as strategy:
        for name, optimizer in REFUSED_BY_SPARSECORES.items():
            model = make(optimizer, strategy)
            with pytest.raises(ValueError, match=f"sparsecore.*{name}"):
                tde.fit(model, data(), verbose=0)
        # Keras does not compile what says that it cannot be.
        with pytest.warns(UserWarning, match="doesn't support `jit_compile"):
            model = make(lambda: K.SGD(0.1), strategy, jit_compile=True)
        assert not model.jit_compile


@pytest.mark.parametrize(
    "setting",
    [{"use_ema": True}, {"gradient_accumulation_steps": 2}],
    ids=lambda one: next(iter(one)),
)
def test_own_tables_refuse_the_option(setting: dict[str, Any]) -> None:
    strategy = tf.distribute.get_strategy()
    model = make(lambda: K.SGD(0.1, **setting), strategy)
    with pytest.raises(ValueError, match=r"Table '.*" + next(iter(setting))):
        steps(model, strategy, data())


AS_ANY_WEIGHT: dict[str, Callable[[], Any]] = {
    "accumulation": lambda: K.Adam(0.05, gradient_accumulation_steps=2),
    "ema": lambda: K.SGD(0.1, use_ema=True, ema_momentum=0.5),
    "clipnorm": lambda: K.SGD(0.1, clipnorm=0.02),
    "global_clipnorm": lambda: K.SGD(0.1, global_clipnorm=0.05),
    "clipvalue": lambda: K.SGD(0.1, clipvalue=0.002),
    "weight_decay": lambda: K.AdamW(0.05, weight_decay=0.3),
    "loss_scale_factor": lambda: K.SGD(0.1, loss_scale_factor=64.0),
    "dynamic_loss_scale": lambda: K.LossScaleOptimizer(
        K.SGD(0.1, clipnorm=0.02)
    ),
}


@functools.cache
def keras_fit(name: str) -> dict[str, Any]:
    model = make(AS_ANY_WEIGHT[name], tf.distribute.get_strategy(), own=False)
    loss = model.fit(data(3 * GLOBAL), verbose=0).history["loss"][0]
    return {"loss": loss} | setup.model_state(model)


@SLOW
@pytest.mark.parametrize(
    "strategy,name",
    [
        ("default", "accumulation"),
        ("default", "ema"),
        ("default", "dynamic_loss_scale"),
        # Keras cannot accumulate on several replicas.
        *(
            ("mirrored", name)
            for name in AS_ANY_WEIGHT
            if name != "accumulation"
        ),
    ],
)
def test_the_models_tables_take_it_as_any_weight(
    mirrored: Any, strategy: str, name: str
) -> None:
    """As Keras' fit on one device does."""
    with setup.under(strategy, mirrored) as made:
        model = make(AS_ANY_WEIGHT[name], made, own=False)
        if name == "ema":
            # At its end, fit sets the averages.
            loss = tde.fit(model, data(3 * GLOBAL), verbose=0).history["loss"]
            got = {"loss": loss[0]} | setup.model_state(model)
        else:
            got = steps(model, made, data(3 * GLOBAL))
    setup.assert_close(got, keras_fit(name))


@pytest.mark.parametrize(
    "setting",
    [
        {"gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_overwrite_frequency": 2},
    ],
    ids=lambda one: list(one)[-1],
)
def test_what_keras_cannot_do_on_two_replicas_is_refused(
    mirrored: Any, setting: dict[str, Any]
) -> None:
    model = make(lambda: K.SGD(0.1, **setting), mirrored, own=False)
    refused = f"{list(setting)[-1]}=.* cannot do on several replicas"
    with pytest.raises(ValueError, match=refused):
        tde.make_train_step(model)


def test_an_overflow_on_one_replica_moves_nothing(mirrored: Any) -> None:
    """Keras looks at the first replica only, and would move NaNs."""
    model = make(
        lambda: K.LossScaleOptimizer(K.SGD(0.1), initial_scale=4.0), mirrored
    )
    step = tde.make_train_step(model, strategy=mirrored)
    inputs, labels = setup.arrays(GLOBAL)
    labels[-1] = np.inf
    whole = tf.data.Dataset.from_tensors((inputs, labels))
    step.build(whole.element_spec)
    before = setup.state(model.embedding)
    for batch in tde.distribute_dataset(whole, mirrored):
        step(batch)
    setup.assert_close(setup.state(model.embedding), before, 0.0)
    assert float(model.optimizer.dynamic_scale.numpy()) == 2.0


def half_precision(
    strategy: tf.distribute.Strategy, scale: float
) -> setup.Model:
    """Its dynamic loss scale grows with every second step."""
    keras.config.set_dtype_policy("mixed_float16")
    return make(
        lambda: K.LossScaleOptimizer(
            K.SGD(0.1), initial_scale=scale, dynamic_growth_steps=2
        ),
        strategy,
    )


def test_mixed_float16_with_a_dynamic_scale_is_that_of_keras() -> None:
    strategy = tf.distribute.get_strategy()
    # Too high for the first steps.
    model, reference = (half_precision(strategy, 2.0**20) for _ in range(2))
    history = tde.fit(model, data(96), epochs=2, verbose=0).history
    expected = reference.fit(data(96), epochs=2, verbose=0).history
    setup.assert_close(
        {"loss": history["loss"]} | setup.model_state(model),
        {"loss": expected["loss"]} | setup.model_state(reference),
        1e-6,
    )
    # Steps that overflowed were skipped, later ones taken.
    step = setup.state(model.embedding)["item/step"]
    assert 0 < step < 12
    assert model.head.compute_dtype == "float16"


@SLOW
def test_mixed_float16_on_two_replicas(mirrored: Any) -> None:
    """The scale and the steps taken are those of one device."""
    got, expected = (
        steps(half_precision(strategy, 8.0), strategy, data(96))
        for strategy in (mirrored, tf.distribute.get_strategy())
    )
    # float16 has 11 bits.
    setup.assert_close(got, expected, 4e-3)
    assert got["item/step"] == 6


def compiled_by_xla(
    strategy: tf.distribute.Strategy, own: bool = True
) -> setup.Model:
    """A model that has seen dense inputs, which XLA can compile."""
    model = make(lambda: K.SGD(0.1), strategy, own)
    inputs, _ = setup.arrays(GLOBAL, "dense")
    model(
        keras.tree.map_structure(
            lambda one: keras.KerasTensor(
                one.shape, keras.backend.standardize_dtype(one.dtype)
            ),
            inputs,
        )
    )
    model.compile(model.optimizer, "mse", jit_compile=True)
    assert model.jit_compile
    return model


@SLOW
@pytest.mark.parametrize("own", [True, False], ids=["own", "the_models"])
def test_jit_compile_on_one_device(own: bool) -> None:
    strategy = tf.distribute.get_strategy()
    model = compiled_by_xla(strategy, own)
    reference = make(lambda: K.SGD(0.1), strategy, own)
    batches = data(32, "dense")
    setup.assert_close(
        steps(model, strategy, batches), steps(reference, strategy, batches)
    )


def test_jit_compile_is_refused_on_two_replicas(mirrored: Any) -> None:
    model = compiled_by_xla(mirrored)
    with pytest.raises(ValueError, match="jit_compile=True cannot"):
        tde.make_train_step(model, strategy=mirrored)


def test_each_table_has_its_optimizer_and_dense_layers_the_model_s() -> None:
    """Adagrad and Adam a table, SGD for the dense layer, after one step."""
    strategy = tf.distribute.get_strategy()
    model = make(lambda: K.SGD(0.1), strategy)
    batch = next(iter(data()))
    model(batch[0])
    before = setup.state(model.embedding)
    kernel = model.head.kernel.numpy()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(batch[0]) - batch[1]) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    item, user, dense, _ = (
        tf.convert_to_tensor(gradient).numpy() for gradient in gradients
    )
    steps(model, strategy, data())
    after = setup.state(model.embedding)
    accumulator = 0.1 + item**2
    np.testing.assert_allclose(
        after["item/values"],
        before["item/values"] - 0.1 * item / np.sqrt(accumulator + 1e-7),
        atol=1e-6,
    )
    # The first step of Adam, with its epsilon where Keras has it.
    scaled = user * np.sqrt(0.001)
    np.testing.assert_allclose(
        after["user/values"],
        before["user/values"] - 0.001 * scaled / (np.abs(scaled) + 1e-7),
        atol=1e-6,
    )
    np.testing.assert_allclose(
        model.head.kernel, kernel - 0.1 * dense, atol=1e-6
    )
