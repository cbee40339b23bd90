"""Step helpers: every strategy gives what one device gives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests import training_setup as setup

# Minutes in one process with other strategies.
pytestmark = pytest.mark.slow

K = keras.optimizers
GLOBAL = 16

METRICS = {
    "metrics": lambda: ["mae", keras.metrics.RootMeanSquaredError("rmse")],
    "weighted_metrics": lambda: [keras.metrics.MeanSquaredError("wmse")],
}


def make(**settings: Any) -> setup.Model:
    keras.utils.set_random_seed(3)
    settings = {k: v() for k, v in METRICS.items()} | settings
    return setup.model(GLOBAL, **settings)


@contextlib.contextmanager
def under(name: str, mirrored: Any) -> Iterator[tf.distribute.Strategy]:
    if name.startswith("emulator"):
        chips, cores = map(int, name.removeprefix("emulator").split("x"))
        with tde.testing.sparsecore_emulator(chips, cores) as strategy:
            yield strategy
    elif name == "mirrored":
        yield mirrored
    else:
        yield tf.distribute.get_strategy()


def train(
    strategy: tf.distribute.Strategy,
    data: tf.data.Dataset,
    epochs: int = 2,
    steps_per_call: int = 1,
    **settings: Any,
) -> tuple[setup.Model, dict[str, Any]]:
    """Losses and metrics of each epoch, and what is left at the end."""
    with strategy.scope():
        model = make(**settings)
    step = tde.make_train_step(
        model, strategy=strategy, steps_per_call=steps_per_call
    )
    evaluate = tde.make_eval_step(model, strategy=strategy)
    predict = tde.make_predict_step(model, strategy=strategy)
    batches = tde.distribute_dataset(data, strategy)
    found: dict[str, Any] = {}
    for epoch in range(epochs):
        step.reset()
        iterator = iter(batches)
        while True:
            try:
                logs = step(iterator)
            except tf.errors.OutOfRangeError:
                break
        found |= {f"{k}/{epoch}": float(v) for k, v in logs.items()}
    for batch in batches:
        logs = evaluate(batch)
    found |= {f"evaluate/{k}": float(v) for k, v in logs.items()}
    found["predict"] = np.concatenate([predict(b).numpy() for b in batches])
    return model, found | setup.model_state(model)


def data(
    rows: int, kind: str = "ragged", sample_weight: bool = False
) -> tf.data.Dataset:
    return setup.dataset(rows, GLOBAL, kind, False, sample_weight)


@functools.cache
def expected(rows: int, kind: str, sample_weight: bool) -> dict[str, Any]:
    return train(tf.distribute.get_strategy(), data(rows, kind, sample_weight))[
        1
    ]


@pytest.mark.parametrize("sample_weight", [False, True])
def test_one_device_gives_what_keras_gives(sample_weight: bool) -> None:
    batches = data(35, "ragged", sample_weight)
    model = make()
    history = model.fit(batches, epochs=2, verbose=0).history
    keras_gives = {
        f"{name}/{epoch}": value
        for name, values in history.items()
        for epoch, value in enumerate(values)
    }
    evaluated = model.evaluate(batches, verbose=0, return_dict=True)
    keras_gives |= {f"evaluate/{k}": v for k, v in evaluated.items()}
    keras_gives["predict"] = model.predict(batches, verbose=0)
    keras_gives |= setup.model_state(model)
    setup.assert_close(expected(35, "ragged", sample_weight), keras_gives, 1e-6)


@pytest.mark.parametrize(
    "strategy,last,kind,sample_weight",
    [
        ("mirrored", 1, "ragged", False),
        ("mirrored", 3, "sparse", True),
        ("mirrored", GLOBAL - 1, "ragged", True),
        ("mirrored", 0, "dense", False),
        ("emulator2x4", 1, "ragged", True),
        ("emulator2x4", 3, "sparse", False),
        ("emulator2x4", GLOBAL - 1, "ragged", False),
        ("emulator2x4", 3, "dense", True),
        pytest.param("emulator1x4", 3, "ragged", True, marks=pytest.mark.slow),
        pytest.param("emulator4x2", 5, "ragged", True, marks=pytest.mark.slow),
    ],
)
def test_every_strategy_gives_what_one_device_gives(
    mirrored: Any, strategy: str, last: int, kind: str, sample_weight: bool
) -> None:
    """A last batch of 1, 3, G - 1 rows; losses, metrics, tables, slots."""
    rows = 2 * GLOBAL + last
    with under(strategy, mirrored) as made:
        _, got = train(made, data(rows, kind, sample_weight))
    setup.assert_close(got, expected(rows, kind, sample_weight))


@pytest.mark.parametrize("strategy", ["default", "mirrored", "emulator2x4"])
def test_several_steps_in_one_call(mirrored: Any, strategy: str) -> None:
    """Three batches in calls of two: the second call takes one."""
    with under(strategy, mirrored) as made:
        _, got = train(made, data(35), steps_per_call=2)
    setup.assert_close(got, expected(35, "ragged", False))


def test_several_steps_of_batches_that_hold_none(mirrored: Any) -> None:
    def without(inputs: Any, labels: Any) -> Any:
        ids, weights = inputs  # Those of "next" are 1.
        return (ids, {**weights, "next": None}), labels

    _, got = train(mirrored, data(35).map(without), steps_per_call=2)
    setup.assert_close(got, expected(35, "ragged", False))


@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_one_trace_however_long_rows_are(mirrored: Any, strategy: str) -> None:
    with under(strategy, mirrored) as made:
        with made.scope():
            model = make()
        traces = []
        call = model.call

        def counted(inputs: Any) -> Any:
            traces.append(tf.distribute.get_replica_context())
            return call(inputs)

        model.call = counted
        step = tde.make_train_step(model, strategy=made)
        seen = set()
        for batch in tde.distribute_dataset(data(35), made):
            step(batch)
            seen.add(len(traces))
    # The first call builds and traces; the next have other lengths and rows.
    assert len(seen) == 1, seen


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


OPTIMIZERS = {
    "dynamic_loss_scale": lambda: K.LossScaleOptimizer(K.SGD(0.1)),
    "loss_scale_factor": lambda: K.SGD(0.1, loss_scale_factor=64.0),
    "clipping": lambda: K.SGD(0.1, clipnorm=0.01),
    "weight_decay": lambda: K.SGD(0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_options_that_do_not_reach_a_table(
    mirrored: Any, strategy: str, name: str
) -> None:
    """After one step the tables are those without the option."""
    batches = data(16)
    expected = train(tf.distribute.get_strategy(), batches, epochs=1)[
        0
    ].embedding
    with under(strategy, mirrored) as made:
        # The optimizer belongs to the strategy that makes its variables.
        with made.scope():
            optimizer = OPTIMIZERS[name]()
        model, _ = train(made, batches, epochs=1, optimizer=optimizer)
    setup.assert_close(setup.state(model.embedding), setup.state(expected))


def test_an_overflow_on_one_replica_moves_nothing(mirrored: Any) -> None:
    """Keras looks at the first replica only, and would move NaNs."""
    with mirrored.scope():
        optimizer = K.LossScaleOptimizer(K.SGD(0.1), initial_scale=4.0)
        model = make(optimizer=optimizer, metrics=[], weighted_metrics=[])
    step = tde.make_train_step(model, strategy=mirrored)
    inputs, labels = setup.arrays(GLOBAL)
    labels[-1] = np.inf
    whole = tf.data.Dataset.from_tensors((inputs, labels))
    step.build(whole.element_spec)
    before = setup.state(model.embedding)
    for batch in tde.distribute_dataset(whole, mirrored):
        step(batch)
    setup.assert_close(setup.state(model.embedding), before, 0.0)
    assert float(optimizer.dynamic_scale.numpy()) == 2.0


@pytest.mark.parametrize(
    "setting",
    [{"use_ema": True}, {"gradient_accumulation_steps": 2}],
    ids=lambda one: next(iter(one)),
)
def test_options_that_a_table_refuses(setting: dict[str, Any]) -> None:
    model = make(optimizer=K.SGD(0.1, **setting))
    step = tde.make_train_step(model)
    with pytest.raises(ValueError, match=r"Table '.*" + next(iter(setting))):
        step(next(iter(data(16))))


def compiled_by_xla() -> setup.Model:
    """A model that has seen dense inputs, which XLA can compile."""
    model = make()
    inputs, _ = setup.arrays(GLOBAL, "dense")
    model(
        keras.tree.map_structure(
            lambda one: keras.KerasTensor(
                one.shape, keras.backend.standardize_dtype(one.dtype)
            ),
            inputs,
        )
    )
    metrics = {name: made() for name, made in METRICS.items()}
    model.compile(K.SGD(0.1), "mse", jit_compile=True, **metrics)
    assert model.jit_compile
    return model


def test_jit_compile_on_one_device() -> None:
    model, reference = compiled_by_xla(), make()
    step = tde.make_train_step(model)
    expected_step = tde.make_train_step(reference)
    for batch in data(32, "dense"):
        logs, expected = step(batch), expected_step(batch)
    setup.assert_close(logs, expected)
    setup.assert_close(setup.model_state(model), setup.model_state(reference))


def test_jit_compile_is_refused_on_two_replicas(mirrored: Any) -> None:
    with mirrored.scope():
        model = compiled_by_xla()
    with pytest.raises(ValueError, match="jit_compile=True cannot"):
        tde.make_train_step(model, strategy=mirrored)


def test_a_sum_over_two_replicas(mirrored: Any) -> None:
    settings = {"loss": keras.losses.MeanSquaredError(reduction="sum")}
    batches = data(19)
    expected = train(tf.distribute.get_strategy(), batches, 1, **settings)[1]
    setup.assert_close(
        train(mirrored, batches, 1, **settings)[1], expected, 1e-4
    )


def test_reductions_that_replicas_cannot_share(mirrored: Any) -> None:
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    with mirrored.scope():
        model = make(loss=loss)
    with pytest.raises(ValueError, match="mean_with_sample_weight"):
        tde.make_train_step(model, strategy=mirrored)


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
    with mirrored.scope():
        model = make()
    with pytest.raises(ValueError, match="no parts for the 2 replicas"):
        tde.make_train_step(model)(next(iter(data(16))))


def test_the_end_of_the_data_raises() -> None:
    step = tde.make_train_step(make())
    iterator = iter(data(16))
    step(iterator)
    with pytest.raises(tf.errors.OutOfRangeError):
        step(iterator)
