"""The four formats of a model's state: written, read, looked into.

For models with one `DistributedEmbedding` and, as last layer, a dense tower
that a Keras optimizer trains.
"""

from __future__ import annotations

import io
import json
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

import tf_distembed as tde
from tf_distembed import state

FORMATS = ["keras", "weights", "checkpoint", "tables"]

State = dict[str, np.ndarray]


def write(model: keras.Model, directory: pathlib.Path, form: str) -> str:
    """Writes a model in a format; returns the path to read it from."""
    if form == "keras":
        model.save(path := str(directory / "model.keras"))
    elif form == "weights":
        model.save_weights(path := str(directory / "model.weights.h5"))
    elif form == "checkpoint":
        path = tf.train.Checkpoint(model=model).save(str(directory / "ck"))
    else:
        tde.save_tables(model, path := str(directory / "tables"))
    return path


def read(model: keras.Model, path: str, form: str) -> None:
    """Loads what a model of the same code has written."""
    if form in ("keras", "weights"):
        # As load_model does when it has made the model from its config.
        model.load_weights(path)
    elif form == "checkpoint":
        tf.train.Checkpoint(model=model).restore(path)
    else:
        tde.load_tables(model, path)


def tables_of(model: Any) -> State:
    """The logical state of the tables."""
    (layer,) = state.embedding_layers(model)
    found = {
        f"{table}:values": value.numpy()
        for table, value in layer.get_embedding_tables().items()
    }
    for table, slots in layer.get_optimizer_state().items():
        for slot, value in slots.items():
            found[f"{table}:{slot}"] = np.asarray(value)
    return found


def state_of(model: keras.Model) -> State:
    """Tables, tower, and the optimizer of the tower."""
    found = tables_of(model)
    for key, variable in _of_the_tower(model).items():
        found[key] = np.array(variable.numpy())
    return found


def set_tower(model: keras.Model, values: Mapping[str, np.ndarray]) -> None:
    """What a directory of tables leaves out, from a `state_of`."""
    for key, variable in _of_the_tower(model).items():
        variable.assign(values[key])


def _of_the_tower(model: keras.Model) -> dict[str, Any]:
    groups = {
        "tower": model.layers[-1].weights,
        "optimizer": model.optimizer.variables,
    }
    return {
        f"{name} {i}": variable
        for name, variables in groups.items()
        for i, variable in enumerate(variables)
    }


def assert_equal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Equal keys in equal order, equal to the last bit."""
    assert list(found) == list(expected)
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


def assert_close(
    found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float
) -> None:
    """Equal keys; says all entries that differ."""
    assert list(found) == list(expected)
    apart = {
        key: float(np.max(np.abs(found[key] - np.float64(value))))
        for key, value in expected.items()
    }
    apart = {key: far for key, far in apart.items() if not far <= tolerance}
    assert not apart, apart


def contents(path: str, form: str) -> dict[str, tuple[int, ...]]:
    """Key -> shape of all that is in a file, as the file has it."""
    if form == "checkpoint":
        return {
            name: tuple(shape) for name, shape in tf.train.list_variables(path)
        }
    if form == "tables":
        return _tables_contents(pathlib.Path(path))
    source: Any = path
    if form == "keras":
        with zipfile.ZipFile(path) as archive:
            source = io.BytesIO(archive.read("model.weights.h5"))
    found: dict[str, tuple[int, ...]] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = tuple(item.shape)

    with h5py.File(source) as file:
        file.visititems(visit)
    return found


def _tables_contents(directory: pathlib.Path) -> dict[str, tuple[int, ...]]:
    index = json.loads((directory / "index.json").read_text())
    found, files = {}, {"index.json"}
    for record in index["entries"]:
        shape = tuple(record["shape"])
        found[f"{record['table']}:{record['slot']}"] = shape
        if "file" in record:
            files.add(record["file"])
            assert np.load(directory / record["file"]).shape == shape
    assert {path.name for path in directory.iterdir()} == files
    return found
