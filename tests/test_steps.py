"""Step helpers: every strategy gives what one device gives."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests import training_setup as setup

K = keras.optimizers
GLOBAL = 16
#: Rows of the last batch of each epoch. Of two replicas the second has none,
#: then the first has more, then both are nearly full.
LASTS = (1, 3, GLOBAL - 1)

METRICS = {
    "metrics": lambda: ["mae", keras.metrics.RootMeanSquaredError("rmse")],
    "weighted_metrics": lambda: [keras.metrics.MeanSquaredError("wmse")],
}


def make(**settings: Any) -> setup.Model:
    keras.utils.set_random_seed(3)
    settings = {k: v() for k, v in METRICS.items()} | settings
    return setup.model(GLOBAL, **settings)


def data(
    rows: int, kind: str = "ragged", sample_weight: bool = False
) -> tf.data.Dataset:
    return setup.dataset(rows, GLOBAL, kind, False, sample_weight)


def epochs_of(kind: str, sample_weight: bool) -> list[tf.data.Dataset]:
    return [data(GLOBAL + last, kind, sample_weight) for last in LASTS]


def train(
    strategy: tf.distribute.Strategy,
    epochs: list[tf.data.Dataset],
    steps_per_call: int = 1,
) -> tuple[setup.Model, dict[str, Any]]:
    """Trains on a dataset each epoch; losses, metrics, and what is left."""
    with strategy.scope():
        model = make()
    step = tde.make_train_step(
        model, strategy=strategy, steps_per_call=steps_per_call
    )
    found: dict[str, Any] = {}
    for epoch, dataset in enumerate(epochs):
        step.reset()
        iterator = iter(tde.distribute_dataset(dataset, strategy))
        while True:
            try:
                logs = step(iterator)
            except tf.errors.OutOfRangeError:
                break
        found |= {f"{k}/{epoch}": float(v) for k, v in logs.items()}
    return model, found | setup.model_state(model)


def evaluate_and_predict(
    model: setup.Model,
    strategy: tf.distribute.Strategy,
    epochs: list[tf.data.Dataset],
) -> dict[str, Any]:
    evaluate = tde.make_eval_step(model, strategy=strategy)
    predict = tde.make_predict_step(model, strategy=strategy)
    found: dict[str, Any] = {}
    for epoch, dataset in enumerate(epochs):
        evaluate.reset()
        outputs = []
        for batch in tde.distribute_dataset(dataset, strategy):
            logs = evaluate(batch)
            outputs.append(predict(batch).numpy())
        found |= {f"evaluate/{k}/{epoch}": float(v) for k, v in logs.items()}
        found[f"predict/{epoch}"] = np.concatenate(outputs)
    return found


def all_of(
    strategy: tf.distribute.Strategy, kind: str, sample_weight: bool
) -> dict[str, Any]:
    epochs = epochs_of(kind, sample_weight)
    model, found = train(strategy, epochs)
    assert_equal_copies(model, strategy)
    return found | evaluate_and_predict(model, strategy, epochs)


@functools.cache
def expected(kind: str = "ragged", sample_weight: bool = True) -> Any:
    return all_of(tf.distribute.get_strategy(), kind, sample_weight)


def expected_training(kind: str = "ragged") -> dict[str, Any]:
    """The same without evaluation and prediction."""
    return {
        k: v
        for k, v in expected(kind).items()
        if not k.startswith(("evaluate", "predict"))
    }


def assert_equal_copies(
    model: keras.Model, strategy: tf.distribute.Strategy
) -> None:
    """To the last bit, on all replicas."""
    variables = model.trainable_variables + model.optimizer.variables
    for variable in variables:
        first, *others = strategy.experimental_local_results(variable.value)
        for other in others:
            np.testing.assert_array_equal(first, other, variable.path)


def test_one_device_gives_what_keras_gives() -> None:
    epochs = epochs_of("ragged", True)
    model = make()
    keras_gives: dict[str, Any] = {}
    for epoch, dataset in enumerate(epochs):
        history = model.fit(dataset, verbose=0).history
        keras_gives |= {f"{k}/{epoch}": v[0] for k, v in history.items()}
    keras_gives |= setup.model_state(model)
    for epoch, dataset in enumerate(epochs):
        logs = model.evaluate(dataset, verbose=0, return_dict=True)
        keras_gives |= {f"evaluate/{k}/{epoch}": v for k, v in logs.items()}
        keras_gives[f"predict/{epoch}"] = model.predict(dataset, verbose=0)
    setup.assert_close(expected(), keras_gives, 1e-6)


@pytest.mark.parametrize(
    "strategy,kind,sample_weight",
    [
        ("mirrored", "ragged", True),
        pytest.param("emulator2x4", "ragged", True, marks=pytest.mark.slow),
        pytest.param("mirrored", "sparse", False, marks=pytest.mark.slow),
        pytest.param("mirrored", "dense", True, marks=pytest.mark.slow),
        pytest.param("emulator2x4", "sparse", False, marks=pytest.mark.slow),
        pytest.param("emulator2x4", "dense", True, marks=pytest.mark.slow),
        pytest.param("emulator1x4", "ragged", True, marks=pytest.mark.slow),
        pytest.param("emulator4x2", "ragged", True, marks=pytest.mark.slow),
    ],
)
def test_every_strategy_gives_what_one_device_gives(
    mirrored: Any, strategy: str, kind: str, sample_weight: bool
) -> None:
    """Losses, metrics, tables, slots, predictions; short last batches."""
    with setup.under(strategy, mirrored) as made:
        got = all_of(made, kind, sample_weight)
    setup.assert_close(got, expected(kind, sample_weight))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["default", "mirrored", "emulator2x4"])
def test_several_steps_in_one_call(mirrored: Any, strategy: str) -> None:
    """Epochs of two batches in calls of three, so each ends within a call."""
    with setup.under(strategy, mirrored) as made:
        _, got = train(made, epochs_of("ragged", True), steps_per_call=3)
    setup.assert_close(got, expected_training())


@pytest.mark.slow
def test_several_steps_of_batches_that_hold_none(mirrored: Any) -> None:
    def without(inputs: Any, *rest: Any) -> Any:
        ids, weights = inputs  # Those of "next" are 1.
        return (ids, {**weights, "next": None}), *rest

    epochs = [dataset.map(without) for dataset in epochs_of("ragged", True)]
    _, got = train(mirrored, epochs, steps_per_call=2)
    setup.assert_close(got, expected_training())


def test_one_trace_however_long_rows_are() -> None:
    model = make()
    traces = []
    call = model.call

    def counted(inputs: Any) -> Any:
        traces.append(inputs)
        return call(inputs)

    model.call = counted
    step = tde.make_train_step(model)
    seen = set()
    for dataset in epochs_of("ragged", False):
        for batch in dataset:
            step(batch)
            seen.add(len(traces))
    # The first call builds and traces; the next have other lengths and rows.
    assert len(seen) == 1, seen


class IdsModel(setup.Model):
    """A model of ids alone, a dict."""

    def call(self, inputs: Any) -> tf.Tensor:
        """Looks up, concatenates, one dense layer."""
        return super().call((inputs, None))


@pytest.mark.parametrize(
    "strategy",
    ["default", pytest.param("emulator2x4", marks=pytest.mark.slow)],
)
def test_elements_may_be_x_or_x_y_or_with_weights(
    mirrored: Any, strategy: str
) -> None:
    def of(structure: Any) -> Any:
        elements = data(GLOBAL + 3).map(lambda x, y: structure(x[0], y))
        return tde.distribute_dataset(elements, made)

    structures = [
        lambda x, y: x,
        lambda x, y: (x,),
        lambda x, y: (x, y),
        lambda x, y: (x, y, tf.ones(tf.shape(y)[0])),
    ]
    with setup.under(strategy, mirrored) as made:
        with made.scope():
            keras.utils.set_random_seed(3)
            model = IdsModel(setup.layer(GLOBAL))
            model.compile(K.SGD(0.0), "mse", jit_compile=False)
        predict = tde.make_predict_step(model)
        evaluate = tde.make_eval_step(model)
        losses, outputs = [], []
        for structure in structures:
            evaluate.reset()
            found = []
            for batch in of(structure):
                found.append(predict(batch).numpy())
                if structure in structures[2:]:
                    loss = evaluate(batch)["loss"]
            outputs.append(np.concatenate(found))
            if structure in structures[2:]:
                losses.append(float(loss))
    assert outputs[0].shape == (GLOBAL + 3, 1)
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0], other)
    assert losses[0] == pytest.approx(losses[1])
    labels = np.concatenate([y.numpy() for _, y in data(GLOBAL + 3)])
    assert losses[0] == pytest.approx(
        np.mean((outputs[0] - labels) ** 2), rel=1e-5
    )


def test_the_steps_of_one_model_take_turns() -> None:
    model = make()
    train_step, eval_step = (
        tde.make_train_step(model),
        tde.make_eval_step(model),
    )
    batch = next(iter(data(16)))
    first = eval_step(batch)["loss"]
    train_step(batch)
    # Not a mean with what the other step has seen.
    second = eval_step(batch)["loss"]
    expected = model.evaluate(data(16), verbose=0, return_dict=True)["loss"]
    assert second < first
    np.testing.assert_allclose(second, expected, rtol=1e-5)


def test_loss_and_optimizer_compile_a_model() -> None:
    reference = make()
    keras.utils.set_random_seed(3)
    model = setup.Model(setup.layer(GLOBAL))
    with pytest.raises(ValueError, match="not compiled"):
        tde.make_train_step(model)
    mean = keras.losses.MeanSquaredError()
    step = tde.make_train_step(
        model, loss=mean, optimizer=K.SGD(0.1), metrics=["mae"]
    )
    tde.make_eval_step(model, loss=mean)
    with pytest.raises(ValueError, match="compiled already, without this loss"):
        tde.make_eval_step(model, loss="mae")
    for batch in data(16):
        logs = step(batch)
        tde.make_train_step(reference)(batch)
    assert set(logs) == {"loss", "mae"}
    setup.assert_close(
        setup.model_state(model), setup.model_state(reference), 1e-6
    )


@pytest.mark.slow
def test_a_sum_over_two_replicas(mirrored: Any) -> None:
    def trained(strategy: tf.distribute.Strategy) -> dict[str, Any]:
        loss = keras.losses.MeanSquaredError(reduction="sum")
        with strategy.scope():
            model = make(loss=loss)
        step = tde.make_train_step(model)
        for batch in tde.distribute_dataset(data(19), strategy):
            logs = step(batch)
        return {"loss": logs["loss"]} | setup.model_state(model)

    setup.assert_close(
        trained(mirrored), trained(tf.distribute.get_strategy()), 1e-4
    )


def test_reductions_that_replicas_cannot_share(mirrored: Any) -> None:
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    with mirrored.scope():
        model = make(loss=loss)
    with pytest.raises(ValueError, match="mean_with_sample_weight"):
        tde.make_train_step(model, strategy=mirrored)


@pytest.mark.slow
def test_how_many_rows_a_tpu_s_replica_takes() -> None:
    """The first batch's, or those that are given; short ones are filled up."""
    short_first = data(GLOBAL + 3).skip(1).concatenate(data(GLOBAL))
    with tde.testing.sparsecore_emulator(2, 4) as strategy:
        with strategy.scope():
            model = make()
        evaluate = tde.make_eval_step(model)
        error = tf.errors.InvalidArgumentError
        first, second = tde.distribute_dataset(short_first, strategy)
        evaluate(first)
        with pytest.raises(error, match="Pass batch_size="):
            evaluate(second)
        told = tde.distribute_dataset(short_first, strategy, batch_size=GLOBAL)
        evaluate = tde.make_eval_step(model)
        iterator = iter(told)
        evaluate(iterator)
        logs = evaluate(iterator)
        whole = tde.distribute_dataset(
            data(GLOBAL + 3), strategy, pad_last_batch=False
        )
        evaluate = tde.make_eval_step(model)
        iterator = iter(whole)
        evaluate(iterator)
        with pytest.raises(error, match="Use pad_last_batch=True"):
            evaluate(iterator)
    reference = make()
    expected_step = tde.make_eval_step(reference)
    for batch in short_first:
        expected_logs = expected_step(batch)
    setup.assert_close(logs, expected_logs)


def test_what_a_step_says(mirrored: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a keras.Model"):
        tde.make_predict_step("model")
    with pytest.raises(ValueError, match="steps_per_call must be at least 1"):
        tde.make_train_step(make(), steps_per_call=0)
    with pytest.raises(ValueError, match="made under a"):
        tde.make_train_step(make(), strategy=mirrored)
    step = tde.make_train_step(make(), steps_per_call=2)
    with pytest.raises(ValueError, match="takes an iterator"):
        step(next(iter(data(16))))
    model = make()
    model.compile(None, "mse")
    with pytest.raises(ValueError, match="compiled without an optimizer"):
        tde.make_train_step(model)
    with mirrored.scope():
        model = make()
    with pytest.raises(ValueError, match="no parts for the 2 replicas"):
        tde.make_train_step(model)(next(iter(data(16))))


def test_outputs_with_a_keras_mask_are_refused_on_replicas(
    mirrored: Any,
) -> None:
    with mirrored.scope():
        model = keras.Sequential(
            [keras.Input((3, 1)), keras.layers.Masking(), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    rows = np.ones((4, 3, 1)), np.ones((4, 3, 1))
    batches = tf.data.Dataset.from_tensor_slices(rows).batch(4)
    step = tde.make_train_step(model)
    with pytest.raises(ValueError, match="output has a Keras mask"):
        step(next(iter(tde.distribute_dataset(batches, mirrored))))


def test_the_end_of_the_data_raises() -> None:
    step = tde.make_train_step(make())
    iterator = iter(data(16))
    step(iterator)
    with pytest.raises(tf.errors.OutOfRangeError):
        step(iterator)
