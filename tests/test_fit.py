"""tde.fit: Keras' loop, on every strategy."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests import training_setup as setup

K = keras.optimizers
GLOBAL = 8
ROWS = 19


def data(kind: str = "ragged", **settings: Any) -> tf.data.Dataset:
    return setup.dataset(ROWS, GLOBAL, kind, drop_remainder=False, **settings)


def make(**settings: Any) -> setup.Model:
    keras.utils.set_random_seed(3)
    return setup.model(GLOBAL, **settings)


def result(model: setup.Model, history: Any) -> dict[str, Any]:
    return {f"history/{k}": v for k, v in history.history.items()} | (
        setup.model_state(model)
    )


class Recorder(keras.callbacks.Callback):
    """What callbacks are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append("train")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch", epoch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("batch", batch, sorted(logs)))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("test", batch, sorted(logs)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("end", epoch, sorted(logs)))

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append("ended")


def test_on_one_device_it_is_keras_fit() -> None:
    """History, callbacks, validation, class weights, schedules."""
    arguments: dict[str, Any] = {
        "epochs": 4,
        "initial_epoch": 1,
        "validation_data": data(),
        "validation_steps": 2,
        "verbose": 0,
    }

    def callbacks(recorder: Recorder) -> list[Any]:
        return [
            recorder,
            keras.callbacks.LearningRateScheduler(
                lambda epoch, rate: 0.1 / (epoch + 1)
            ),
        ]

    ours, theirs = Recorder(), Recorder()
    model = make()
    history = tde.fit(model, data(), callbacks=callbacks(ours), **arguments)
    reference = make()
    expected = reference.fit(data(), callbacks=callbacks(theirs), **arguments)
    setup.assert_close(
        result(model, history), result(reference, expected), 1e-6
    )
    assert history is model.history
    assert history.epoch == expected.epoch == [1, 2, 3]
    assert ours.calls == theirs.calls


@pytest.mark.slow
def test_steps_per_epoch_goes_on_in_the_data() -> None:
    model, reference = make(), make()
    arguments = {"epochs": 3, "steps_per_epoch": 2, "verbose": 0}
    history = tde.fit(model, data().repeat(), **arguments)
    expected = reference.fit(data().repeat(), **arguments)
    setup.assert_close(
        result(model, history), result(reference, expected), 1e-6
    )


def test_several_steps_a_call_give_the_same() -> None:
    model, reference = make(), make()
    history = tde.fit(
        model,
        data().repeat(),
        epochs=2,
        steps_per_epoch=3,
        steps_per_call=2,
        verbose=0,
    )
    expected = reference.fit(
        data().repeat(), epochs=2, steps_per_epoch=3, verbose=0
    )
    setup.assert_close(
        result(model, history), result(reference, expected), 1e-6
    )


@pytest.mark.slow
def test_class_weights_are_those_of_keras() -> None:
    def labelled() -> tf.data.Dataset:
        return data().map(lambda x, y: (x, tf.cast(y > 0, tf.int32)))

    weights = {0: 1.0, 1: 3.0}
    settings = {"loss": "binary_crossentropy", "metrics": []}
    model, reference = make(**settings), make(**settings)
    history = tde.fit(model, labelled(), class_weight=weights, verbose=0)
    expected = reference.fit(labelled(), class_weight=weights, verbose=0)
    setup.assert_close(
        result(model, history), result(reference, expected), 1e-6
    )
    with pytest.raises(ValueError, match=r"elements \(x, y\)"):
        tde.fit(
            make(), data(sample_weight=True), class_weight=weights, verbose=0
        )


def test_class_weights_of_a_distributed_dataset(mirrored: Any) -> None:
    with mirrored.scope():
        model = make()
    batches = tde.distribute_dataset(data(), mirrored)
    with pytest.raises(ValueError, match="not distributed yet.*Distributed"):
        tde.fit(model, batches, class_weight={0: 1.0, 1: 3.0}, verbose=0)


@pytest.fixture
def _tensorboard(monkeypatch: Any) -> None:
    """What `tf.summary.scalar` calls, which TensorFlow 2.21 comes without."""
    if importlib.util.find_spec("tensorboard") is not None:
        return

    def scalar(name: str, data: Any, step: Any = None, **_: Any) -> Any:
        return tf.summary.write(name, tf.cast(data, tf.float32), step)

    name = "tensorboard.summary.v2"
    while name:
        module = types.ModuleType(name)
        module.scalar = scalar
        monkeypatch.setitem(sys.modules, name, module)
        name = name.rpartition(".")[0]


def tags_of(directory: Path) -> set[str]:
    """Names of what a TensorBoard would show."""
    return {
        value.tag
        for file in directory.glob("events*")
        for record in tf.data.TFRecordDataset(str(file))
        for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value
    }


@pytest.mark.usefixtures("_tensorboard")
def test_callbacks_of_keras(tmp_path: Path) -> None:
    """EarlyStopping, ModelCheckpoint, TensorBoard, CSVLogger."""
    model = make()
    path = tmp_path / "best.weights.h5"
    history = tde.fit(
        model,
        data(),
        epochs=9,
        verbose=0,
        validation_data=data(),
        callbacks=[
            keras.callbacks.EarlyStopping(
                "val_loss",
                min_delta=1e9,
                patience=2,
                restore_best_weights=True,
            ),
            keras.callbacks.ModelCheckpoint(
                tmp_path / "{epoch}.weights.h5", save_weights_only=True
            ),
            keras.callbacks.ModelCheckpoint(
                path, "val_loss", save_best_only=True, save_weights_only=True
            ),
            keras.callbacks.TensorBoard(tmp_path / "logs", update_freq=1),
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        ],
    )
    assert history.epoch == [0, 1, 2]
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 4
    assert {"epoch_loss", "epoch_mae", "batch_loss"} <= tags_of(
        tmp_path / "logs" / "train"
    )
    assert "epoch_mae" in str(tags_of(tmp_path / "logs" / "validation"))
    saved = {
        name: _item_table(tmp_path / f"{name}.weights.h5")
        for name in ("1", "2", "3", "best")
    }
    # For EarlyStopping none was better than the first.
    left = model.embedding.get_embedding_tables()["item"].numpy()
    assert [
        np.allclose(saved[name], left, atol=1e-6) for name in ("1", "2", "3")
    ] == [True, False, False]
    losses = history.history["val_loss"]
    best = str(1 + losses.index(min(losses)))
    np.testing.assert_array_equal(saved["best"], saved[best])


def _item_table(path: Path) -> Any:
    """A table in a file of weights."""
    model = make()
    model(next(iter(data()))[0])
    model.load_weights(path)
    return model.embedding.get_embedding_tables()["item"].numpy()


def test_the_progress_bar_is_keras_own(capsys) -> None:
    tde.fit(make(), data(), epochs=2, verbose=2)
    printed = capsys.readouterr().out
    assert "Epoch 1/2" in printed
    assert "3/3" in printed
    assert "loss" in printed


@pytest.mark.slow
def test_two_replicas_give_what_one_device_gives(mirrored) -> None:
    arguments: dict[str, Any] = {
        "epochs": 2,
        "validation_data": data(),
        "verbose": 0,
    }
    reference = make()
    expected = result(reference, tde.fit(reference, data(), **arguments))
    with mirrored.scope():
        model = make()
    got = result(model, tde.fit(model, data(), **arguments))
    setup.assert_close(got, expected)


@pytest.mark.slow
def test_the_emulator_gives_what_one_device_gives() -> None:
    arguments: dict[str, Any] = {
        "epochs": 2,
        "validation_data": data(),
        "verbose": 0,
    }
    reference = make()
    expected = result(reference, tde.fit(reference, data(), **arguments))
    with tde.testing.sparsecore_emulator(2) as strategy:
        with strategy.scope():
            model = make()
        got = result(model, tde.fit(model, data(), **arguments))
    setup.assert_close(got, expected)


def test_no_table_counts_a_step_that_gets_no_data() -> None:
    """Keras begins one where the number of batches is not known."""
    by_keras, by_tde = make(), make()
    unknown = data().filter(lambda *_: True)
    by_keras.fit(unknown, epochs=2, verbose=0)
    tde.fit(by_tde, unknown, epochs=2, verbose=0)
    assert by_tde.optimizer.iterations == 6
    for model in (by_keras, by_tde):
        slots = model.embedding.get_optimizer_state()
        assert {name: slots[name]["step"] for name in slots} == {
            "item": 6,
            "user": 6,
        }


def test_data_that_end_too_early() -> None:
    with pytest.warns(UserWarning, match="after 3 of the 5 batches of epoch 0"):
        history = tde.fit(
            make(), data(), epochs=3, steps_per_epoch=5, verbose=0
        )
    assert history.epoch == [0]


@pytest.mark.parametrize(
    "error,match,arguments",
    [
        (TypeError, "fit takes a tf.data.Dataset", {"dataset": [1]}),
        (TypeError, "save_freq must be", {"save_freq": "batch"}),
        (ValueError, "save_freq must be at least 1", {"save_freq": 0}),
        (TypeError, "steps_per_call must be an int", {"steps_per_call": 1.5}),
    ],
)
def test_fit_says_what_it_takes(error, match, arguments) -> None:
    arguments = {"dataset": data()} | arguments
    with pytest.raises(error, match=match):
        tde.fit(make(), verbose=0, **arguments)


def test_a_model_that_fit_cannot_train() -> None:
    with pytest.raises(TypeError, match=r"must be a keras.Model"):
        tde.fit(setup.layer(), data())
    with pytest.raises(ValueError, match="not compiled"):
        tde.fit(setup.Model(setup.layer()), data())

    class Own(setup.Model):
        def train_step(self, batch: Any) -> Any:
            raise AssertionError

    own = Own(setup.layer())
    own.compile("sgd", "mse")
    with pytest.raises(ValueError, match="train_step of its own"):
        tde.fit(own, data())
