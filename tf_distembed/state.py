"""Tables and optimizer slots in a directory, for any layout to load.

`save_tables` writes one `.npy` a table and slot, and an index. Values go
through memory a block of rows at a time, both ways.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tf_distembed.layer import DistributedEmbedding
from tf_distembed.row_files import RowFile, write_row_file
from tf_distembed.table_state import Entry, Found, TableState, check_entries
from tf_distembed.tables import STEP, VALUES

INDEX = "index.json"
FORMAT = 1

_NPY_DTYPES = ("float16", "float32", "float64")


def save_tables(
    layer_or_model: Any,
    directory: str | os.PathLike[str],
    *,
    tables: Sequence[str] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes tables, their slots and step counts into a new directory.

    The directory appears whole or not at all: it is written beside its place
    and renamed. A table of a dtype that `.npy` does not have (bfloat16) is
    stored as float32, which loses nothing. Rows go through memory in blocks of
    65,536, also in `load_tables`; a checkpoint or a `.keras` file takes memory
    for each table and slot as a whole.

    Args:
        layer_or_model: A `DistributedEmbedding`, or a model that has some.
        directory: Where to; its parent must exist.
        tables: Names of the tables to write; None: all.
        overwrite: Whether an existing directory of tables may be replaced.

    Raises:
        FileExistsError: `directory` exists and `overwrite` is False, or it is
            no directory of tables.
        FileNotFoundError: its parent does not exist.
        ValueError: an unknown table, or a name that two layers use.

    Example:

    ```python
    import tempfile
    import tf_distembed as tde

    item = tde.TableConfig("item", 100, 4)
    layer = tde.DistributedEmbedding(tde.FeatureConfig("item", item))
    directory = tempfile.mkdtemp() + "/tables"
    tde.save_tables(layer, directory)
    tde.load_tables(layer, directory)
    ```
    """
    target = pathlib.Path(directory)
    if target.exists():
        is_ours = (target / INDEX).is_file()
        if not (overwrite and (is_ours or _is_empty_directory(target))):
            raise FileExistsError(
                f"'{target}' exists"
                + ("" if is_ours else " and is no directory of tables")
                + ". Choose another directory"
                + ("." if overwrite else ", or use overwrite=True.")
            )
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"There is no directory '{target.parent}' to put "
            f"'{target.name}' in. Make it first."
        )
    chosen = _choose(_entries(layer_or_model), tables)
    beside = _beside(target)
    beside.mkdir()
    try:
        index = []
        for number, (state, entry) in enumerate(chosen):
            record = state.record(entry)
            if entry.slot != STEP:
                # Table names need not be file names.
                record["file"] = f"{number:05d}.npy"
                _write_npy(beside / record["file"], state, entry)
            index.append(record)
        text = json.dumps({"format": FORMAT, "entries": index}, indent=1)
        (beside / INDEX).write_text(text, encoding="utf-8")
        _move_into_place(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def load_tables(
    layer_or_model: Any,
    directory: str | os.PathLike[str],
    *,
    tables: Sequence[str] | None = None,
    slots: bool = True,
    strict: bool = True,
) -> None:
    """Loads what `save_tables` wrote, all of it or nothing.

    Args:
        layer_or_model: A `DistributedEmbedding`, or a model that has some.
        directory: Where from.
        tables: Names of the tables to load; None: all of the layer's.
        slots: Whether to load the optimizer slots and step counts too.
        strict: Whether every table asked for must be in the directory, and
            every table in the directory in the layer. Without it, tables of
            one side only are left as they are.

    Raises:
        FileNotFoundError: no directory of tables there.
        ValueError: a table or slot is missing or of another shape or dtype;
            all are named. Or a file is damaged. Nothing is loaded.
    """
    source = pathlib.Path(directory)
    if not (source / INDEX).is_file():
        raise FileNotFoundError(
            f"'{source}' is no directory of tables: it has no {INDEX}. "
            "save_tables writes one."
        )
    records = _read_index(source / INDEX)
    here = _entries(layer_or_model)
    chosen = _choose(here, tables)
    if tables is not None:
        records = [r for r in records if r["table"] in tables]
    if not strict:
        in_file = {record["table"] for record in records}
        in_layer = {entry.table for _, entry in chosen}
        chosen = [(s, e) for s, e in chosen if e.table in in_file]
        records = [r for r in records if r["table"] in in_layer]
    if not slots:
        chosen = [(s, e) for s, e in chosen if e.slot == VALUES]
        records = [r for r in records if r["slot"] == VALUES]
    arrays = {f"{r['table']}:{r['slot']}": _open(source, r) for r in records}
    dtypes = [record["dtype"] for record in records]
    check_entries(
        [entry for _, entry in chosen],
        {
            key: Found(array.shape, dtype)
            for (key, array), dtype in zip(arrays.items(), dtypes, strict=True)
        },
        f"'{source}'",
        "slots=False loads the values alone, strict=False the tables that "
        "both sides have.",
    )
    for state in {id(state): state for state, _ in chosen}.values():
        state.check_steps(
            {
                entry.table: int(arrays[entry.key])
                for owner, entry in chosen
                if owner is state and entry.slot == STEP
            }
        )
    for state, entry in chosen:
        state.write(entry, arrays[entry.key])


def embedding_layers(layer_or_model: Any) -> list[DistributedEmbedding]:
    """The `DistributedEmbedding` layers of a model, or the layer itself.

    Raises:
        TypeError: neither a layer nor a model.
        ValueError: there is none.
    """
    if not isinstance(layer_or_model, keras.layers.Layer):
        raise TypeError(
            "Expected a DistributedEmbedding or a model that has one. "
            f"Received: {layer_or_model!r} (of type "
            f"{type(layer_or_model).__name__})"
        )
    found = [
        layer
        for layer in layer_or_model._flatten_layers()
        if isinstance(layer, DistributedEmbedding)
    ]
    if not found:
        raise ValueError(
            f"'{layer_or_model.name}' has no DistributedEmbedding layer. If "
            "it makes one in its build, call it once before."
        )
    return found


def _entries(layer_or_model: Any) -> list[tuple[TableState, Entry]]:
    found = []
    owner: dict[str, DistributedEmbedding] = {}
    for layer in embedding_layers(layer_or_model):
        state = layer.table_state()
        for entry in state.entries():
            other = owner.setdefault(entry.table, layer)
            if other is not layer:
                raise ValueError(
                    f"The layers '{other.name}' and '{layer.name}' both have "
                    f"a table '{entry.table}'. Save and load each layer on "
                    "its own, in a directory of its own."
                )
            found.append((state, entry))
    return found


def _choose(
    entries: list[tuple[TableState, Entry]], tables: Sequence[str] | None
) -> list[tuple[TableState, Entry]]:
    if tables is None:
        return entries
    if isinstance(tables, str):
        raise TypeError(
            f"tables must be a list of table names. Received: {tables!r}"
        )
    names = {entry.table for _, entry in entries}
    unknown = sorted(set(tables) - names)
    if unknown:
        raise ValueError(
            f"There are no tables {unknown}. The tables are {sorted(names)}."
        )
    return [(s, entry) for s, entry in entries if entry.table in tables]


def _write_npy(path: pathlib.Path, state: TableState, entry: Entry) -> None:
    dtype = entry.dtype if entry.dtype in _NPY_DTYPES else "float32"
    blocks = (values for _, values in state.read_blocks(entry))
    write_row_file(path, entry.shape, dtype, blocks)


def _read_index(path: pathlib.Path) -> list[dict[str, Any]]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version, records = index["format"], index["entries"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"'{path}' is damaged ({error!r}), and nothing was loaded."
        ) from error
    if version != FORMAT:
        raise ValueError(
            f"'{path.parent}' has format {version}; this version reads format "
            f"{FORMAT}."
        )
    return records


def _open(source: pathlib.Path, record: dict[str, Any]) -> Any:
    if "file" not in record:
        return np.asarray(record["value"], np.int64)
    path = source / record["file"]
    try:
        return RowFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"'{path}', the '{record['slot']}' of table '{record['table']}', "
            f"is missing or damaged ({error}), and nothing was loaded."
        ) from error


def _beside(target: pathlib.Path) -> pathlib.Path:
    """A new name in the same directory, where a rename is atomic."""
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}")


def _is_empty_directory(path: pathlib.Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _move_into_place(beside: pathlib.Path, target: pathlib.Path) -> None:
    """Replaces `target`, which is never a part: old, new, or between renames.

    If the second rename fails, the old directory is put back.
    """
    if not target.exists():
        beside.rename(target)
        return
    old = _beside(target)
    target.rename(old)
    try:
        beside.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
