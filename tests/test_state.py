"""One logical state, in four formats: written, read, refused, continued.

`.keras`, `save_weights`, `tf.train.Checkpoint` and `save_tables` hold, for
each table, its values, its slots and its step count, and nothing of how the
layer keeps them.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests.state_formats import (
    FORMATS,
    assert_equal,
    contents,
    read,
    set_tower,
    state_of,
    tables_of,
    write,
)
from tf_distembed import state
from tf_distembed.row_files import RowFile, write_row_file


def make_layer(
    item: Any = "adam", rows: int = 10, **arguments: Any
) -> tde.DistributedEmbedding:
    tables = {
        "item": tde.TableConfig("item", rows, 4, optimizer=item),
        "user": tde.TableConfig("user", 6, 3, optimizer="adagrad"),
    }
    return tde.DistributedEmbedding(
        {name: tde.FeatureConfig(name, t) for name, t in tables.items()},
        **{"name": "embedding", **arguments},
    )


def make_model(*arguments: Any, **keywords: Any) -> keras.Model:
    """Tables on Adam and Adagrad under a dense tower on Adam."""
    inputs = {
        "item": keras.Input((None,), dtype="int64", ragged=True, name="item"),
        "user": keras.Input((), dtype="int64", name="user"),
    }
    found = make_layer(*arguments, **keywords)(inputs)
    joined = keras.layers.Concatenate()([found["item"], found["user"]])
    outputs = keras.layers.Dense(1, name="tower")(joined)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.05), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


@keras.saving.register_keras_serializable("test_state")
class Subclassed(keras.Model):
    """The same, subclassed; with `lazy` the layer is made in build."""

    def __init__(self, lazy: bool = False) -> None:
        super().__init__()
        self.lazy = lazy
        if not lazy:
            self.embedding = make_layer()
        self.tower = keras.layers.Dense(1)

    def build(self, shape: Any) -> None:
        if self.lazy:
            self.embedding = make_layer()
        self.tower.build((None, 7))

    def call(self, inputs: Any, training: bool = False) -> Any:
        found = self.embedding(inputs, training=training)
        return self.tower(tf.concat([found["item"], found["user"]], -1))


BATCHES = [
    ([[1, 2, 2], [], [3]], [0, 1, 1]),
    ([[9], [3, 3], []], [5, 2, 0]),
    ([[], [], [1]], [4, 4, 1]),
]


def dataset() -> tf.data.Dataset:
    """Three steps."""
    items = tf.ragged.constant([r for b in BATCHES for r in b[0]], tf.int64)
    users = tf.constant([u for b in BATCHES for u in b[1]], tf.int64)
    labels = tf.range(9.0)[:, None]
    return tf.data.Dataset.from_tensor_slices(
        ({"item": items, "user": users}, labels)
    ).batch(3)


def train(model: keras.Model, epochs: int = 1) -> keras.Model:
    model.fit(dataset(), epochs=epochs, shuffle=False, verbose=0)
    return model


@pytest.fixture(scope="module")
def trained() -> keras.Model:
    """After three steps. No test trains it further."""
    return train(make_model())


@pytest.fixture(scope="module")
def written(trained, tmp_path_factory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("written")
    return {form: write(trained, directory, form) for form in FORMATS}


# -- Reading back -------------------------------


@pytest.fixture(scope="module")
def uninterrupted(trained) -> dict[str, Any]:
    """The state after six steps, from the start that `trained` had."""
    keras.utils.set_random_seed(20240229)
    once = train(make_model())
    assert_equal(state_of(once), state_of(trained))
    return state_of(train(once))


@pytest.fixture(autouse=True, scope="module")
def _same_start() -> None:
    keras.utils.set_random_seed(20240229)


@pytest.mark.parametrize("form", FORMATS)
def test_training_goes_on_as_if_it_had_not_been_interrupted(
    form, trained, written, uninterrupted
):
    if form == "keras":
        again = keras.models.load_model(written[form])
    else:
        again = make_model()
        read(again, written[form], form)
    assert_equal(tables_of(again), tables_of(trained))
    if form == "tables":
        set_tower(again, state_of(trained))
    assert_equal(state_of(again), state_of(trained))
    assert tables_of(again)["item:step"] == 3
    assert_equal(state_of(train(again)), uninterrupted)


NEW_PROCESS = """
    import json, sys
    import keras, numpy as np
    import tf_distembed
    model = keras.models.load_model(sys.argv[1])
    layer = model.get_layer("embedding")
    state = layer.get_optimizer_state()
    print(json.dumps({
        "values": layer.get_embedding_tables()["item"].numpy().tolist(),
        "velocity": state["item"]["velocity"].numpy().tolist(),
        "step": state["item"]["step"],
        "class": type(layer).__name__,
    }))
"""


def test_a_keras_file_loads_in_a_new_process_without_custom_objects(
    trained, written
):
    # Keras looks for classes in modules that are imported, and nowhere else.
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NEW_PROCESS), written["keras"]],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=pathlib.Path(tde.__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    expected = tables_of(trained)
    assert found["class"] == "DistributedEmbedding"
    assert found["step"] == 3
    np.testing.assert_array_equal(
        np.float32(found["values"]), expected["item:values"]
    )
    np.testing.assert_array_equal(
        np.float32(found["velocity"]), expected["item:velocity"]
    )


# -- What is in the files -----------------------

KEYS = [
    "item:momentum",
    "item:step",
    "item:values",
    "item:velocity",
    "user:accumulator",
    "user:step",
    "user:values",
]


@pytest.mark.parametrize("form", ["keras", "weights"])
def test_keras_files_have_the_logical_state_alone(form, written):
    names = sorted(contents(written[form], form))
    assert names == [
        "layers/dense/vars/0",
        "layers/dense/vars/1",
        *[f"layers/distributed_embedding/vars/{key}" for key in KEYS],
        # Its step count and learning rate, two slots of the tower's weights.
        *[f"optimizer/vars/{i}" for i in range(2 + 4)],
    ]


def test_a_checkpoint_has_each_table_once(written):
    shapes = contents(written["checkpoint"], "checkpoint")
    of_layer = [name for name in shapes if ":" in name]
    assert sorted(name.split("/")[-1] for name in of_layer) == KEYS
    prefix = of_layer[0].rsplit("/.ATTRIBUTES", 1)[0]
    index = f"{prefix}/table_index/.ATTRIBUTES/py_state"
    assert index in shapes
    others = {
        name: shape
        for name, shape in shapes.items()
        if name not in of_layer and name != index
    }
    # Nothing else has the shape of a table.
    assert not {(10, 4), (6, 3)} & {tuple(shape) for shape in others.values()}


def test_a_directory_of_tables_has_an_index_and_a_file_a_table_and_slot(
    trained, written
):
    directory = pathlib.Path(written["tables"])
    index = json.loads((directory / "index.json").read_text())
    records = {f"{r['table']}:{r['slot']}": r for r in index["entries"]}
    assert sorted(records) == KEYS
    expected = tables_of(trained)
    files = set()
    for key, record in records.items():
        assert tuple(record["shape"]) == expected[key].shape
        if record["slot"] == "step":
            assert record["value"] == 3
            continue
        assert record["dtype"] == "float32"
        files.add(record["file"])
        array = np.load(directory / record["file"])
        np.testing.assert_array_equal(array, expected[key])
    assert {path.name for path in directory.iterdir()} == {
        "index.json",
        *files,
    }


def test_a_table_without_an_own_optimizer_is_written_by_its_values(tmp_path):
    table = tde.TableConfig("item", 10, 4, optimizer=None)
    layer = tde.DistributedEmbedding(tde.FeatureConfig("f", table))
    model = keras.Sequential(
        [keras.Input((2,), dtype="int64"), layer, keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
    model.fit(np.array([[1, 2]]), np.ones([1, 1]), verbose=0)
    path = tf.train.Checkpoint(model).save(str(tmp_path / "ck"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert [n.split("/")[-1] for n in names if ":" in n] == ["item:values"]
    # The model's optimizer writes its own slots of the table, not the table.
    shapes = [shape for _, shape in tf.train.list_variables(path)]
    assert shapes.count([10, 4]) == 1 + 2
    before = layer.get_embedding_tables()["item"].numpy()
    layer.set_embedding_tables({"item": np.zeros([10, 4])})
    tf.train.Checkpoint(model).restore(path).assert_consumed()
    np.testing.assert_array_equal(layer.get_embedding_tables()["item"], before)


# -- tf.train.Checkpoint ------------------------


def test_a_checkpoint_is_consumed_whole(trained, written):
    model = make_model()
    status = tf.train.Checkpoint(model=model).restore(written["checkpoint"])
    status.assert_consumed()
    status.assert_existing_objects_matched()
    assert_equal(state_of(model), state_of(trained))


def test_a_checkpoint_of_the_layer_alone(tmp_path):
    layer, again = make_layer(), make_layer()
    path = tf.train.Checkpoint(layer).write(str(tmp_path / "layer"))
    tf.train.Checkpoint(again).read(path).assert_consumed()
    assert_equal(tables_of(again), tables_of(layer))


def test_a_checkpoint_through_its_manager(tmp_path):
    layer = make_layer()
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(layer=layer), str(tmp_path), max_to_keep=1
    )
    before = tables_of(layer)
    manager.save()
    layer.set_embedding_tables({"item": np.zeros([10, 4])})
    manager.save()
    layer.set_embedding_tables({"item": before["item:values"]})
    manager.restore_or_initialize()
    np.testing.assert_array_equal(tables_of(layer)["item:values"], 0.0)


@pytest.mark.parametrize("lazy", [False, True], ids=["in_init", "in_build"])
def test_a_checkpoint_restored_before_the_model_is_called(lazy, tmp_path):
    inputs = next(iter(dataset()))[0]
    source = Subclassed(lazy)
    source.compile(keras.optimizers.Adam(0.05), "mse")
    train(source)
    path = tf.train.Checkpoint(model=source).save(str(tmp_path / "ck"))
    model = Subclassed(lazy)
    tf.train.Checkpoint(model=model).restore(path)
    assert hasattr(model, "embedding") is not lazy
    np.testing.assert_array_equal(model(inputs), source(inputs))
    assert_equal(tables_of(model), tables_of(source))
    assert tables_of(model)["user:step"] == 3


def test_an_export_has_the_tables(trained, tmp_path):
    # What keeps tables out of checkpoints must not keep them out of this.
    table = tde.TableConfig("item", 10, 4)
    layer = tde.DistributedEmbedding(tde.FeatureConfig("f", table))
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer])
    ids = tf.constant([[1, 2], [9, 9]], tf.int64)
    tf.train.Checkpoint(model).save(str(tmp_path / "ck"))
    model.export(str(tmp_path / "export"), verbose=False)
    again = tf.saved_model.load(str(tmp_path / "export"))
    np.testing.assert_array_equal(again.serve(ids), model(ids))


# -- Files that do not fit ----------------------

UNFIT = {
    "sgd": (
        ("sgd",),
        [
            "'item:momentum' belongs to no table or slot here",
            "'item:velocity' belongs to no table or slot here",
        ],
    ),
    "adagrad": (
        ("adagrad",),
        [
            "'item:accumulator' is missing",
            "'item:momentum' belongs to no table or slot here",
            "'item:velocity' belongs to no table or slot here",
        ],
    ),
    # As many slots as Adam has, of the same shapes.
    "ftrl": (
        ("ftrl",),
        [
            "'item:accumulator' is missing",
            "'item:linear' is missing",
            "'item:velocity' belongs to no table or slot here",
        ],
    ),
    "rows": (
        ("adam", 11),
        [
            "'item:values' has shape (10, 4), expected (11, 4)",
            "'item:velocity' has shape (10, 4), expected (11, 4)",
        ],
    ),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("unfit", UNFIT)
def test_a_file_that_does_not_fit_is_refused_whole(form, unfit, written):
    arguments, parts = UNFIT[unfit]
    model = make_model(*arguments)
    before = tables_of(model)
    with pytest.raises(ValueError) as caught:
        read(model, written[form], form)
    for part in ["does not fit", "nothing was loaded", "'table:slot'", *parts]:
        assert part in str(caught.value), caught.value
    assert_equal(tables_of(model), before)


@pytest.mark.parametrize("form", ["weights", "checkpoint", "tables"])
def test_a_file_with_other_tables_is_refused_whole(form, tmp_path):
    def model_of(*names: str) -> keras.Model:
        layer = tde.DistributedEmbedding(
            [
                tde.FeatureConfig(name, tde.TableConfig(name, 5, 2))
                for name in names
            ],
            name="embedding",
        )
        one = keras.Input((), dtype="int64")
        outputs = keras.layers.Concatenate()(layer([one] * len(names)))
        return keras.Model(one, outputs)

    path = write(model_of("a", "b"), tmp_path, form)
    model = model_of("b", "c")
    before = tables_of(model)
    with pytest.raises(ValueError) as caught:
        read(model, path, form)
    for part in ("values", "momentum", "velocity", "step"):
        assert f"'c:{part}' is missing" in str(caught.value)
        assert f"'a:{part}' belongs to no table" in str(caught.value)
    assert "'b:" not in str(caught.value)
    assert_equal(tables_of(model), before)


def test_a_checkpoint_that_does_not_fit_changes_nothing_of_the_model(written):
    model = make_model("adagrad")
    before = state_of(model)
    with pytest.raises(ValueError, match="layer 'embedding' does not fit"):
        read(model, written["checkpoint"], "checkpoint")
    assert_equal(state_of(model), before)


# -- save_tables and load_tables ----------------


def test_some_tables_are_saved_and_loaded(trained, tmp_path):
    tde.save_tables(trained, tmp_path / "some", tables=["user"])
    layer = make_layer()
    before = tables_of(layer)
    with pytest.raises(ValueError) as caught:
        tde.load_tables(layer, tmp_path / "some")
    assert "'item:values' is missing" in str(caught.value)
    assert "strict=False" in str(caught.value)
    assert_equal(tables_of(layer), before)
    tde.load_tables(layer, tmp_path / "some", tables=["user"])
    expected = {
        key: tables_of(trained)[key] if key.startswith("user:") else value
        for key, value in before.items()
    }
    assert_equal(tables_of(layer), expected)


def test_without_strict_the_tables_of_both_sides_are_loaded(
    trained, written, tmp_path
):
    user = tde.TableConfig("user", 6, 3, optimizer="adagrad")
    other = tde.TableConfig("other", 6, 3)
    layer = tde.DistributedEmbedding(
        [tde.FeatureConfig(t.name, t) for t in (other, user)]
    )
    before = tables_of(layer)
    tde.load_tables(layer, written["tables"], strict=False)
    for key, value in tables_of(layer).items():
        from_file = key.startswith("user:")
        expected = tables_of(trained) if from_file else before
        np.testing.assert_array_equal(value, expected[key])
    with pytest.raises(ValueError, match="'other:values' is missing"):
        tde.load_tables(layer, written["tables"])
    # What is on both sides must fit.
    wrong = make_layer("adagrad")
    with pytest.raises(ValueError, match="'item:accumulator' is missing"):
        tde.load_tables(wrong, written["tables"], strict=False)


def test_values_are_loaded_without_their_slots(trained, written):
    layer = make_layer("adagrad")
    before = tables_of(layer)
    tde.load_tables(layer, written["tables"], slots=False)
    expected = {
        key: tables_of(trained)[key] if key.endswith(":values") else value
        for key, value in before.items()
    }
    assert_equal(tables_of(layer), expected)


def test_unknown_tables_are_refused(written, tmp_path):
    layer = make_layer()
    for call in (
        lambda: tde.save_tables(layer, tmp_path / "t", tables=["movie"]),
        lambda: tde.load_tables(layer, written["tables"], tables=["movie"]),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert "['movie']" in str(caught.value)
        assert "['item', 'user']" in str(caught.value)
    with pytest.raises(TypeError, match="list of table names.*'item'"):
        tde.save_tables(layer, tmp_path / "t", tables="item")
    assert list(tmp_path.iterdir()) == []


def test_what_has_no_tables_is_refused(tmp_path):
    with pytest.raises(TypeError, match="DistributedEmbedding.*'x'"):
        tde.save_tables("x", tmp_path / "t")
    model = keras.Sequential([keras.layers.Dense(1)], name="plain")
    with pytest.raises(ValueError) as caught:
        tde.save_tables(model, tmp_path / "t")
    assert "'plain' has no DistributedEmbedding" in str(caught.value)


def test_an_existing_directory_is_kept_unless_overwrite(tmp_path):
    layer = make_layer()
    directory = tmp_path / "tables"
    tde.save_tables(layer, directory)
    before = sorted(p.name for p in directory.iterdir())
    with pytest.raises(FileExistsError) as caught:
        tde.save_tables(layer, directory)
    assert str(directory) in str(caught.value)
    assert "overwrite=True" in str(caught.value)
    layer.set_embedding_tables({"item": np.zeros([10, 4])})
    tde.save_tables(layer, directory, overwrite=True)
    assert sorted(p.name for p in directory.iterdir()) == before
    again = make_layer()
    tde.load_tables(again, directory)
    np.testing.assert_array_equal(tables_of(again)["item:values"], 0.0)
    assert [p.name for p in tmp_path.iterdir()] == ["tables"]


def test_what_is_no_directory_of_tables_is_never_replaced(tmp_path):
    layer = make_layer()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("mine", "file"):
        with pytest.raises(FileExistsError, match="is no directory of tables"):
            tde.save_tables(layer, tmp_path / name, overwrite=True)
    assert (tmp_path / "mine" / "precious").read_text() == "x"
    (tmp_path / "empty").mkdir()
    tde.save_tables(layer, tmp_path / "empty", overwrite=True)
    with pytest.raises(FileNotFoundError, match="There is no directory"):
        tde.save_tables(layer, tmp_path / "not" / "there")
    with pytest.raises(FileNotFoundError, match=r"has no index\.json"):
        tde.load_tables(layer, tmp_path / "mine")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "empty",
        "file",
        "mine",
    ]


def test_the_directory_may_be_read_by_whoever_may_read_a_new_one(tmp_path):
    (tmp_path / "usual").mkdir()
    tde.save_tables(make_layer(), tmp_path / "tables")
    assert (tmp_path / "tables").stat().st_mode == (
        tmp_path / "usual"
    ).stat().st_mode


@pytest.mark.parametrize("there_is_one", [True, False])
@pytest.mark.parametrize("failing", ["write", "rename"])
def test_an_exception_while_saving_leaves_what_was_there(
    failing, there_is_one, tmp_path, monkeypatch
):
    layer = make_layer()
    directory = tmp_path / "tables"
    before = tables_of(layer)
    if there_is_one:
        tde.save_tables(layer, directory)
        layer.set_embedding_tables({"item": np.zeros([10, 4])})
    if failing == "write":
        write_row_file = state.write_row_file

        def fail(path: Any, *args: Any) -> None:
            if "00002" in str(path):
                raise OSError("disk full")
            write_row_file(path, *args)

        monkeypatch.setattr(state, "write_row_file", fail)
    else:
        rename = pathlib.Path.rename

        def fail(self: pathlib.Path, target: Any) -> Any:
            # The new one to its place; not the old one back there.
            if pathlib.Path(target) == directory and (
                there_is_one is False or _is_new(self)
            ):
                raise OSError("disk full")
            return rename(self, target)

        def _is_new(path: pathlib.Path) -> bool:
            values = np.load(path / "00000.npy")
            return not values.any()

        monkeypatch.setattr(pathlib.Path, "rename", fail)
    with pytest.raises(OSError, match="disk full"):
        tde.save_tables(layer, directory, overwrite=True)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == (
        ["tables"] if there_is_one else []
    )
    if there_is_one:
        again = make_layer()
        tde.load_tables(again, directory)
        assert_equal(tables_of(again), before)


@pytest.mark.parametrize(
    "damage", ["truncated", "gone", "version", "columns", "index", "format"]
)
def test_a_damaged_directory_is_refused_whole(damage, tmp_path):
    tde.save_tables(make_layer(), tmp_path / "tables")
    index = tmp_path / "tables" / "index.json"
    file = tmp_path / "tables" / "00004.npy"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-9])
    elif damage == "gone":
        file.unlink()
    elif damage == "version":
        file.write_bytes(file.read_bytes().replace(b"NUMPY\x01", b"NUMPY\x09"))
    elif damage == "columns":
        np.save(file, np.asfortranarray(np.load(file)))
    elif damage == "index":
        index.write_text(index.read_text()[:-20])
    else:
        index.write_text(
            index.read_text().replace('"format": 1', '"format": 2')
        )
    layer = make_layer()
    before = tables_of(layer)
    with pytest.raises(ValueError) as caught:
        tde.load_tables(layer, tmp_path / "tables")
    parts = {
        "truncated": ["00004.npy", "table 'user'", "damaged", " bytes with "],
        "version": ["00004.npy", "table 'user'", "version of the .npy format"],
        "columns": ["00004.npy", "table 'user'", "numbers, row by row"],
        "gone": ["00004.npy", "table 'user'", "missing"],
        "index": ["index.json", "damaged"],
        "format": ["format 2", "format 1"],
    }
    for part in parts[damage]:
        assert part in str(caught.value), caught.value
    assert_equal(tables_of(layer), before)


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "values.npy"
    write_row_file(path, (8, 2), "float32", [np.ones([8, 2], "float32")])
    rows = RowFile(path)
    np.testing.assert_array_equal(rows[6:], np.ones([2, 2]))
    os.truncate(path, path.stat().st_size - 8)
    np.testing.assert_array_equal(rows[:7], np.ones([7, 2]))
    with pytest.raises(OSError, match="values.npy' became shorter while in"):
        rows[6:]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_come_back_bit_by_bit(dtype, tmp_path):
    def make() -> tde.DistributedEmbedding:
        return make_layer(dtype=dtype)

    layer, again = make(), make()
    tde.save_tables(layer, tmp_path / "tables")
    index = json.loads((tmp_path / "tables" / "index.json").read_text())
    assert index["entries"][0]["dtype"] == dtype
    stored = np.load(tmp_path / "tables" / index["entries"][0]["file"])
    assert stored.dtype == ("float32" if dtype == "bfloat16" else dtype)
    tde.load_tables(again, tmp_path / "tables")
    assert_equal(tables_of(again), tables_of(layer))
    path = tf.train.Checkpoint(layer).save(str(tmp_path / "ck"))
    again = make()
    tf.train.Checkpoint(again).restore(path).assert_consumed()
    assert_equal(tables_of(again), tables_of(layer))
    # Another dtype is not taken silently.
    float32 = make_layer()
    before = tables_of(float32)
    for call in (
        lambda: tde.load_tables(float32, tmp_path / "tables"),
        lambda: tf.train.Checkpoint(float32).restore(path),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        text = f"'item:values' has dtype {dtype}, expected float32"
        assert text in str(caught.value)
        assert_equal(tables_of(float32), before)


def test_a_bfloat16_model_through_a_keras_file(tmp_path):
    table = tde.TableConfig("item", 10, 4, optimizer="adagrad")
    layer = tde.DistributedEmbedding(
        tde.FeatureConfig("f", table), dtype="bfloat16", name="embedding"
    )
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer])
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert_equal(tables_of(again), tables_of(model))


def test_tables_larger_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr("tf_distembed.table_state.BLOCK_ROWS", 4)
    layer, again = make_layer(), make_layer()
    tde.save_tables(layer, tmp_path / "tables")
    tde.load_tables(again, tmp_path / "tables")
    assert_equal(tables_of(again), tables_of(layer))


def test_names_that_are_no_file_names(tmp_path):
    names = ["a b", "ä:ö", "..", "x" * 300, "%s", "values"]
    tables = [tde.TableConfig(name, 3, 2) for name in names]
    layer, again = (
        tde.DistributedEmbedding([tde.FeatureConfig(t.name, t) for t in tables])
        for _ in range(2)
    )
    tde.save_tables(layer, tmp_path / "tables")
    tde.load_tables(again, tmp_path / "tables")
    assert_equal(tables_of(again), tables_of(layer))
    path = tf.train.Checkpoint(layer).save(str(tmp_path / "ck"))
    again.set_embedding_tables({"..": np.zeros([3, 2])})
    tf.train.Checkpoint(again).restore(path).assert_consumed()
    assert_equal(tables_of(again), tables_of(layer))
    one = keras.Input((), dtype="int64")
    models = [
        keras.Model(one, keras.layers.Add()(which([one] * len(names))))
        for which in (layer, again)
    ]
    models[0].save_weights(tmp_path / "model.weights.h5")
    again.set_embedding_tables({"..": np.zeros([3, 2])})
    models[1].load_weights(tmp_path / "model.weights.h5")
    assert_equal(tables_of(again), tables_of(layer))


# -- Two layers in one model --------------------


def two_layers(*names: str) -> keras.Model:
    one = keras.Input((), dtype="int64")
    outputs = []
    for name in names:
        table = tde.TableConfig(name, 5, 2)
        feature = tde.FeatureConfig("f", table)
        outputs.append(tde.DistributedEmbedding(feature)(one))
    return keras.Model(one, keras.layers.Concatenate()(outputs))


def all_tables(model: keras.Model) -> dict[str, np.ndarray]:
    found = {}
    for i, layer in enumerate(state.embedding_layers(model)):
        found |= {f"{i} {key}": v for key, v in tables_of(layer).items()}
    return found


@pytest.mark.parametrize("form", FORMATS)
def test_two_layers_in_one_model(form, tmp_path):
    model, again = two_layers("a", "b"), two_layers("a", "b")
    path = write(model, tmp_path, form)
    if form == "keras":
        again = keras.models.load_model(path)
    else:
        read(again, path, form)
    assert len(all_tables(again)) == 8
    assert_equal(all_tables(again), all_tables(model))


@pytest.mark.parametrize("form", ["keras", "weights", "checkpoint"])
def test_two_layers_with_tables_of_one_name(form, tmp_path):
    model, again = two_layers("a", "a"), two_layers("a", "a")
    path = write(model, tmp_path, form)
    if form == "keras":
        again = keras.models.load_model(path)
    else:
        read(again, path, form)
    found = all_tables(again)
    assert (found["0 a:values"] != found["1 a:values"]).any()
    assert_equal(found, all_tables(model))


@pytest.mark.parametrize("same_name", [True, False])
def test_save_tables_refuses_two_tables_of_one_name(same_name, tmp_path):
    table = tde.TableConfig("item", 5, 2)
    layers = [
        tde.DistributedEmbedding(
            tde.FeatureConfig("f", table), name="e" if same_name else f"e{i}"
        )
        for i in range(2)
    ]
    model = keras.Sequential(
        [layers[0], keras.Sequential([layers[1]], name="inner")]
    )
    with pytest.raises(ValueError) as caught:
        tde.save_tables(model, tmp_path / "tables")
    assert "both have a table 'item'" in str(caught.value)
    assert "in a directory of its own" in str(caught.value)
    assert os.listdir(tmp_path) == []
    for i, layer in enumerate(layers):
        tde.save_tables(layer, tmp_path / str(i))
