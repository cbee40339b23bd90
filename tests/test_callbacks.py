"""TableLearningRateScheduler."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import tf_distembed as tde


def model_of(**optimizers: Any) -> tuple[keras.Model, Any]:
    """A model whose tables have these optimizers."""
    layer = tde.DistributedEmbedding(
        {
            name: tde.FeatureConfig(
                name,
                tde.TableConfig(
                    name, 4, 2, optimizer=optimizer, initializer="ones"
                ),
            )
            for name, optimizer in optimizers.items()
        }
    )
    inputs = {
        name: keras.Input((), dtype="int64", name=name) for name in optimizers
    }
    outputs = keras.layers.add([*layer(inputs).values()])
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse", jit_compile=False)
    return model, layer


def fit(model: keras.Model, scheduler: Any, epochs: int = 2) -> None:
    inputs = {name: np.array([1, 1, 3]) for name in model.input}
    model.fit(
        inputs,
        np.zeros((3, 2)),
        epochs=epochs,
        callbacks=[scheduler],
        verbose=0,
    )


def rates(layer: Any) -> dict[str, float]:
    return {
        name: float(optimizer.learning_rate)
        for name, optimizer in layer.table_optimizers.items()
    }


def test_all_tables_follow_a_function_and_train_with_its_rates():
    model, layer = model_of(a=keras.optimizers.SGD(0.5), b="adagrad")
    fit(model, tde.TableLearningRateScheduler(lambda epoch, rate: 0.0))
    for values in layer.get_embedding_tables().values():
        np.testing.assert_array_equal(values, np.ones((4, 2)))
    fit(model, tde.TableLearningRateScheduler(lambda epoch, rate: 0.25))
    assert rates(layer) == {"a": 0.25, "b": 0.25}
    for values in layer.get_embedding_tables().values():
        assert (values.numpy()[[1, 3]] != 1).all()


def test_a_dict_sets_the_tables_it_names_and_sees_epoch_and_rate(capsys):
    model, layer = model_of(a="sgd", b="sgd")
    seen = []

    def schedule(epoch: int, rate: float) -> float:
        seen.append((epoch, round(rate, 4)))
        return rate / 2

    fit(model, tde.TableLearningRateScheduler({"a": schedule}, verbose=1))
    assert seen == [(0, 0.01), (1, 0.005)]
    assert rates(layer) == pytest.approx({"a": 0.0025, "b": 0.01})
    assert "Epoch 2: the learning rate of table 'a'" in capsys.readouterr().out


def test_an_optimizer_that_tables_share_is_set_once():
    shared = keras.optimizers.SGD(0.08)
    model, layer = model_of(a=shared, b=shared)
    fit(model, tde.TableLearningRateScheduler(lambda epoch, rate: rate / 2))
    assert rates(layer) == pytest.approx({"a": 0.02, "b": 0.02})


def test_native_optimizers_are_set_too():
    native = tf_native().SGD(0.08)
    model, layer = model_of(a=native, b="sgd")
    fit(model, tde.TableLearningRateScheduler({"a": lambda epoch, rate: 0.5}))
    assert rates(layer)["a"] == 0.5


def tf_native() -> Any:
    import tensorflow as tf

    return tf.tpu.experimental.embedding


@pytest.mark.parametrize("by_name", [False, True])
def test_tables_of_one_name_in_two_layers_are_set(by_name):
    layers = [
        tde.DistributedEmbedding(
            tde.FeatureConfig(
                "a", tde.TableConfig("a", 4, 2, optimizer=optimizer)
            )
        )
        for optimizer in ("sgd", "adagrad")
    ]
    ids = keras.Input((), dtype="int64", name="a")
    outputs = keras.layers.add([layer(ids) for layer in layers])
    model = keras.Model({"a": ids}, outputs)
    model.compile("sgd", "mse")

    def schedule(epoch: int, rate: float) -> float:
        return 0.25

    fit(
        model,
        tde.TableLearningRateScheduler(
            {"a": schedule} if by_name else schedule
        ),
    )
    assert [rates(layer) for layer in layers] == [{"a": 0.25}] * 2


def test_a_table_of_the_models_optimizer_is_no_table_to_set():
    model, _ = model_of(a="sgd", b=None)
    match = r"names tables \['b'\].*no optimizer of their own.*\['a'\]"
    with pytest.raises(ValueError, match=match):
        fit(model, tde.TableLearningRateScheduler({"b": lambda *_: 0.5}))


def test_a_model_without_tables_is_refused():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    scheduler = tde.TableLearningRateScheduler(lambda epoch, rate: rate)
    with pytest.raises(ValueError, match="has no DistributedEmbedding layer"):
        model.fit(np.ones((3, 1)), np.ones((3, 2)), callbacks=[scheduler])


@pytest.mark.parametrize(
    "scheduler, named",
    [
        (lambda: {"nope": lambda epoch, rate: rate}, "nope"),
        (lambda: lambda epoch, rate: "fast", "'fast'"),
    ],
)
def test_what_cannot_be_set_raises(scheduler, named):
    model, layer = model_of(a="sgd", b="sgd")
    with pytest.raises(ValueError, match=named):
        fit(model, tde.TableLearningRateScheduler(scheduler()))
    assert rates(layer) == pytest.approx({"a": 0.01, "b": 0.01})


def test_a_schedule_that_changes_by_itself_raises():
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model, _ = model_of(a=keras.optimizers.SGD(decay), b="sgd")
    with pytest.raises(ValueError, match="'a'.*changes by itself"):
        fit(model, tde.TableLearningRateScheduler(lambda epoch, rate: rate))


def test_what_is_no_schedule_raises_when_made():
    with pytest.raises(TypeError, match="schedule must be a function"):
        tde.TableLearningRateScheduler(0.1)
