"""State moves between all backends, in all formats, and training goes on.

The default device and 1, 2 and 4 emulated chips, stacked and not, each write
four files after some steps; each reads all of them and takes one more step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests.state_formats import (
    FORMATS,
    State,
    assert_close,
    assert_equal,
    contents,
    read,
    set_tower,
    state_of,
    tables_of,
    write,
)

BATCH, STEPS = 16, 2

#: Backend -> chips, SparseCores of a chip, stacking where it writes, where it
#: reads.
BACKENDS: dict[str, tuple[int, int, Any, Any]] = {
    "default device": (0, 0, "auto", None),
    "1 chip": (1, 2, None, "auto"),
    "2 chips": (2, 4, "auto", None),
    "4 chips": (4, 4, [["tag", "item"]], "auto"),
}
FAST = ("default device", "2 chips")


def if_fast(name: str, *values: Any) -> Any:
    """A parameter; slow unless it is about the fast backends alone."""
    marks = [] if name in FAST else [pytest.mark.slow]
    return pytest.param(name, *values, marks=marks)


ALL = [if_fast(name) for name in BACKENDS]


def make_model(
    stacking: Any = "auto",
    *,
    batch: int | None = BATCH,
    item_rows: int = 21,
    item_optimizer: Any = "adam",
) -> keras.Model:
    """Two tables on Adam, which can be stacked, and one on Adagrad.

    No number of rows and no width is one that a SparseCore has. "item" is
    shared by a dense and a ragged feature with weights.
    """
    drawn = keras.initializers.RandomUniform
    item = tde.TableConfig("item", item_rows, 4, drawn(seed=1), item_optimizer)
    tag = tde.TableConfig("tag", 13, 4, drawn(seed=2), "adam", "sum")
    # An epsilon that matters: it is in a SparseCore's accumulator.
    adagrad = keras.optimizers.Adagrad(0.05, 0.01, epsilon=0.01)
    user = tde.TableConfig("user", 9, 3, drawn(seed=3), adagrad)
    layer = tde.DistributedEmbedding(
        {
            "next": tde.FeatureConfig("next", item, (batch,)),
            "seen": tde.FeatureConfig("seen", item, (batch, None)),
            "tags": tde.FeatureConfig("tags", tag, (batch, 2)),
            "user": tde.FeatureConfig("user", user, (batch,)),
        },
        table_stacking=stacking,
        name="embedding",
    )

    def ids(name: str, *shape: int | None, ragged: bool = False) -> Any:
        return keras.Input(shape, dtype="int64", name=name, ragged=ragged)

    inputs = {
        "next": ids("next"),
        "seen": ids("seen", None, ragged=True),
        "tags": ids("tags", 2),
        "user": ids("user"),
    }
    weights = keras.Input((None,), ragged=True, name="weights")
    found = layer(inputs, {**dict.fromkeys(inputs), "seen": weights})
    outputs = keras.layers.Dense(
        1, kernel_initializer=drawn(seed=5), name="tower"
    )(keras.layers.Concatenate()(list(found.values())))
    model = keras.Model({**inputs, "weights": weights}, outputs)
    model.compile(keras.optimizers.Adam(0.05), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def dataset(steps: int = STEPS + 1) -> tf.data.Dataset:
    """Batches with repeated ids, empty rows, and rows that only some touch."""
    rng = np.random.default_rng(0)
    rows = steps * BATCH
    lengths = rng.integers(0, 4, rows)
    seen = tf.RaggedTensor.from_row_lengths(
        tf.constant(rng.integers(0, 21, lengths.sum()), tf.int64), lengths
    )
    weights = rng.uniform(0.5, 2.0, lengths.sum())
    inputs = {
        "next": rng.integers(0, 21, rows),
        "seen": seen,
        "tags": rng.integers(0, 13, (rows, 2)),
        "user": rng.integers(0, 9, rows),
        "weights": seen.with_values(tf.constant(weights, tf.float32)),
    }
    labels = rng.normal(size=(rows, 1)).astype("float32")
    examples = tf.data.Dataset.from_tensor_slices((inputs, labels))
    return examples.batch(BATCH, drop_remainder=True)


@contextlib.contextmanager
def strategy_of(name: str) -> Iterator[tf.distribute.Strategy]:
    chips, cores, _, _ = BACKENDS[name]
    if not chips:
        yield tf.distribute.get_strategy()
        return
    with tde.testing.sparsecore_emulator(chips, cores) as strategy:
        yield strategy


def made_on(
    strategy: tf.distribute.Strategy, *args: Any, **kwargs: Any
) -> keras.Model:
    with strategy.scope():
        return make_model(*args, **kwargs)


def stepper(
    model: keras.Model, strategy: tf.distribute.Strategy, steps: int = STEPS + 1
) -> Callable[[int], Any]:
    """What takes the training step of a number."""
    step = tde.make_train_step(model, strategy=strategy)
    batches = list(tde.distribute_dataset(dataset(steps), strategy))
    return lambda number: step(batches[number])


def predict(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    step = tde.make_predict_step(model, strategy=strategy)
    step(next(iter(tde.distribute_dataset(dataset(), strategy))))


@pytest.fixture(autouse=True, scope="module")
def _random_seed() -> None:
    """Once: a new seed makes TensorFlow forget the steps it has compiled."""
    keras.utils.set_random_seed(20240229)


# -- The sources -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Source:
    """A model that was trained and written, and never moved.

    Attributes:
        paths: Format -> where it was written.
        written: Its state then.
        after: Its state one step later.
    """

    paths: dict[str, str]
    written: State
    after: State


def make_source(name: str, directory: pathlib.Path) -> Source:
    with strategy_of(name) as strategy:
        model = made_on(strategy, BACKENDS[name][2])
        first = state_of(model)
        step = stepper(model, strategy)
        for number in range(STEPS):
            step(number)
        written = state_of(model)
        paths = {form: write(model, directory, form) for form in FORMATS}
        step(STEPS)
        source = Source(paths, written, state_of(model))
    for key, value in source.written.items():
        # The learning rate of the tower's optimizer stays what it is.
        if key != "optimizer 1":
            assert (value != first[key]).any(), key
            assert (value != source.after[key]).any(), key
    return source


@pytest.fixture(scope="module")
def fast_sources(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Source]:
    return {
        name: make_source(name, tmp_path_factory.mktemp("source"))
        for name in FAST
    }


@pytest.fixture(scope="module")
def sources(
    fast_sources: dict[str, Source],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Source]:
    others = [name for name in BACKENDS if name not in FAST]
    return fast_sources | {
        name: make_source(name, tmp_path_factory.mktemp("source"))
        for name in others
    }


@pytest.fixture
def sources_of(name: str, request: pytest.FixtureRequest) -> dict[str, Source]:
    """At least those that a test of a backend needs."""
    which = "fast_sources" if name in FAST else "sources"
    return request.getfixturevalue(which)


# -- Every move --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Target:
    """A model that reads one file after another.

    Attributes:
        model: The model.
        step: Takes the training step of a number.
        sources: What it reads.
    """

    model: keras.Model
    step: Callable[[int], Any]
    sources: dict[str, Source]


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    name, is_fast = request.param
    # Sources have emulators of their own, and there is one at a time.
    which = "fast_sources" if is_fast else "sources"
    found = request.getfixturevalue(which)
    with contextlib.ExitStack() as entered:
        strategy = entered.enter_context(strategy_of(name))
        _entered.append(entered)
        model = made_on(strategy, BACKENDS[name][3])
        yield Target(model, stepper(model, strategy), found)


_entered: list[contextlib.ExitStack] = []


@pytest.fixture(autouse=True)
def _leave_target(request: pytest.FixtureRequest) -> None:
    """Else the last one stays until the end of the module."""
    if "target" not in request.fixturenames:
        while _entered:
            _entered.pop().close()


def moves() -> list[Any]:
    found = []
    for target in BACKENDS:
        for source in BACKENDS:
            is_fast = {source, target} <= set(FAST)
            found += [
                pytest.param(
                    (target, is_fast),
                    source,
                    form,
                    marks=[] if is_fast else [pytest.mark.slow],
                    id=f"{form}: {source} to {target}",
                )
                for form in FORMATS
            ]
    return found


@pytest.mark.parametrize(
    "target, source, form", moves(), indirect=["target"], scope="module"
)
def test_a_step_after_a_move_is_the_step_of_training_that_never_moved(
    target: Target, source: str, form: str
) -> None:
    moved = target.sources[source]
    read(target.model, moved.paths[form], form)
    if form == "tables":
        assert_unequal(state_of(target.model), moved.written)
        set_tower(target.model, moved.written)
    found = state_of(target.model)
    # A SparseCore's accumulator holds Keras' and its epsilon.
    rounded = {"user:accumulator"}
    assert_equal(without(found, rounded), without(moved.written, rounded))
    assert_close(found, moved.written, 3e-8)
    target.step(STEPS)
    assert_close(state_of(target.model), moved.after, 2e-5)
    on_one_device = target.sources["default device"].after
    assert_close(state_of(target.model), on_one_device, 2e-5)


def without(state: State, keys: set[str]) -> State:
    return {key: value for key, value in state.items() if key not in keys}


def assert_unequal(found: State, expected: State) -> None:
    with pytest.raises(AssertionError):
        assert_equal(found, expected)


def test_a_table_of_4_chips_goes_on_training_on_the_cpu_and_back(
    tmp_path: pathlib.Path,
) -> None:
    with strategy_of("4 chips") as strategy:
        on_chips = made_on(strategy)
        chips_step = stepper(on_chips, strategy, 6)
        on_cpu, stays = make_model(), make_model()
        default = tf.distribute.get_strategy()
        cpu_step, stays_step = (
            stepper(model, default, 6) for model in (on_cpu, stays)
        )
        for number in range(6):
            stays_step(number)
        for number in range(2):
            chips_step(number)
        path = write(on_chips, tmp_path, "tables")
        read(on_cpu, path, "tables")
        set_tower(on_cpu, state_of(on_chips))
        for number in range(2, 4):
            cpu_step(number)
        path = write(on_cpu, tmp_path, "checkpoint")
        read(on_chips, path, "checkpoint")
        for number in range(4, 6):
            chips_step(number)
        assert_close(state_of(on_chips), state_of(stays), 2e-5)
        assert tables_of(on_chips)["item:step"] == 6


# -- What is in the files ----------------------------------------------------

KEYS = {
    **{f"item:{slot}": (21, 4) for slot in ("values", "momentum", "velocity")},
    **{f"tag:{slot}": (13, 4) for slot in ("values", "momentum", "velocity")},
    **{f"user:{slot}": (9, 3) for slot in ("values", "accumulator")},
    **{f"{table}:step": () for table in ("item", "tag", "user")},
}
TOWER = [(15, 1), (1,)]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("form", ["keras", "weights"])
def test_keras_files_have_no_variable_of_a_backend(
    name: str, form: str, sources_of: dict[str, Source]
) -> None:
    # Of the tower's optimizer: step count, learning rate, a slot's variables.
    optimizer = [(), (), (15, 1), (15, 1), (1,), (1,)]
    prefix = "layers/distributed_embedding/vars"
    assert contents(sources_of[name].paths[form], form) == {
        **{f"{prefix}/{key}": shape for key, shape in KEYS.items()},
        **{f"layers/dense/vars/{i}": s for i, s in enumerate(TOWER)},
        **{f"optimizer/vars/{i}": s for i, s in enumerate(optimizer)},
    }


@pytest.mark.parametrize("name", ALL)
def test_checkpoints_have_no_variable_of_a_backend(
    name: str, sources_of: dict[str, Source]
) -> None:
    found = contents(sources_of[name].paths["checkpoint"], "checkpoint")
    of_tables = {
        key.rsplit("/", 1)[1]: shape
        for key, shape in found.items()
        if ":" in key
    }
    assert of_tables == KEYS
    others = sorted(
        key.split("/.ATTRIBUTES")[0] for key in found if ":" not in key
    )
    assert others == [
        "_CHECKPOINTABLE_OBJECT_GRAPH",
        "model/_operations/5/table_index",
        "model/_operations/7/_kernel",
        "model/_operations/7/bias",
        "model/optimizer/_iterations",
        "model/optimizer/_learning_rate",
        *[f"model/optimizer/_variables/{i}" for i in range(2, 6)],
        "save_counter",
    ]


@pytest.mark.parametrize("name", ALL)
def test_directories_of_tables_have_no_variable_of_a_backend(
    name: str, sources_of: dict[str, Source]
) -> None:
    assert contents(sources_of[name].paths["tables"], "tables") == KEYS


def test_a_checkpoint_of_another_backend_is_consumed_whole(
    fast_sources: dict[str, Source],
) -> None:
    with strategy_of("2 chips") as strategy:
        model = made_on(strategy)
        path = fast_sources["default device"].paths["checkpoint"]
        status = tf.train.Checkpoint(model=model).restore(path)
        status.assert_consumed()
        status.assert_existing_objects_matched()


# -- Before the variables are there ------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "form",
    # A file of weights is read as a .keras file is, by the test below.
    [pytest.param("weights", marks=pytest.mark.slow), "checkpoint", "tables"],
)
def test_what_is_restored_before_the_first_call_is_there_after_it(
    name: str,
    form: str,
    sources_of: dict[str, Source],
    tmp_path: pathlib.Path,
) -> None:
    other = "2 chips" if name == "default device" else "default device"
    source = sources_of[other]
    path = source.paths[form]
    if form == "tables":
        shutil.copytree(path, path := str(tmp_path / "tables"))
    with strategy_of(name) as strategy:
        model = made_on(strategy, batch=None)
        read(model, path, form)
        if form == "tables":
            shutil.rmtree(path)
        if name != "default device":
            with pytest.raises(RuntimeError, match="no variables yet"):
                tables_of(model)
        predict(model, strategy)
        expected = {key: source.written[key] for key in tables_of(model)}
        assert_close(tables_of(model), expected, 3e-8)


@pytest.mark.parametrize("name", ALL)
def test_a_keras_file_is_loaded_on_another_backend_and_trained(
    name: str, sources_of: dict[str, Source], tmp_path: pathlib.Path
) -> None:
    # Without a declared batch: the variables come with the first step.
    make_model(batch=None).save(tmp_path / "model.keras")
    other = "2 chips" if name == "default device" else "default device"
    source = sources_of[other]
    path = tmp_path / "trained.keras"
    trained = make_model(batch=None)
    read(trained, source.paths["keras"], "keras")
    trained.save(path)
    with strategy_of(name) as strategy:
        with strategy.scope():
            model = keras.models.load_model(path)
        stepper(model, strategy)(STEPS)
        assert_close(state_of(model), source.after, 2e-5)


# -- Files that do not fit ---------------------------------------------------


@pytest.mark.parametrize(
    "built", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_files_that_do_not_fit_are_refused_whole_on_sparsecores(
    built: bool, fast_sources: dict[str, Source]
) -> None:
    unfit = {"item_rows": 22, "item_optimizer": "adagrad"}
    with strategy_of("2 chips") as strategy:
        model = made_on(strategy, batch=BATCH if built else None, **unfit)
        before = made_on(strategy, **unfit)
        for source in fast_sources.values():
            for form, path in source.paths.items():
                with pytest.raises(ValueError) as caught:
                    read(model, path, form)
                for part in (
                    "nothing was loaded",
                    "'item:values' has shape (21, 4), expected (22, 4)",
                    "'item:accumulator' is missing",
                    "'item:momentum' belongs to no table or slot here",
                    "'item:velocity' belongs to no table or slot here",
                ):
                    assert part in str(caught.value), (form, caught.value)
        if not built:
            predict(model, strategy)
        assert_equal(tables_of(model), tables_of(before))


def test_step_counts_that_one_stack_cannot_have_are_refused_in_all_formats(
    fast_sources: dict[str, Source], tmp_path: pathlib.Path
) -> None:
    apart = make_model()
    set_tower(apart, fast_sources["default device"].written)
    tables = fast_sources["default device"].paths["tables"]
    tde.load_tables(apart, tables, tables=["item"])
    steps = {k: int(v) for k, v in tables_of(apart).items() if ":step" in k}
    assert steps == {"item:step": STEPS, "tag:step": 0, "user:step": 0}
    paths = {form: write(apart, tmp_path, form) for form in FORMATS}
    with strategy_of("2 chips") as strategy:
        stacked, alone = made_on(strategy), made_on(strategy, None)
        for form in ("tables", "checkpoint", "weights", "keras"):
            before = state_of(stacked)
            with pytest.raises(ValueError) as caught:
                read(stacked, paths[form], form)
            assert f"{{'item': {STEPS}, 'tag': 0}}" in str(caught.value)
            assert "table_stacking" in str(caught.value)
            if form in ("checkpoint", "tables"):
                # Keras' own loader sets the other layers, then it raises.
                assert_equal(state_of(stacked), before)
            assert_equal(
                tables_of(stacked),
                {key: before[key] for key in tables_of(stacked)},
            )
            read(alone, paths[form], form)
            assert_close(tables_of(alone), tables_of(apart), 3e-8)
