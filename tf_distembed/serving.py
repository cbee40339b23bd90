"""A trained model as a SavedModel that needs nothing but TensorFlow."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_distembed import structures
from tf_distembed.embed_reduce import EmbedReduce
from tf_distembed.export_report import (
    ExportedTable,
    ExportReport,
    ServedTensor,
)
from tf_distembed.initial_values import BLOCK_ROWS
from tf_distembed.layer import DistributedEmbedding
from tf_distembed.row_optimizers import write_rows
from tf_distembed.serving_signature import (
    ServedInput,
    flat_outputs,
    served_inputs,
)
from tf_distembed.table_variable import components
from tf_distembed.tables import VALUES

SIGNATURE = "serving_default"
ROW_DTYPES = ("float32", "float16", "bfloat16")


def export_for_serving(
    model: Any,
    directory: str | pathlib.Path,
    *,
    signature: Any = None,
    row_dtype: str = "float32",
) -> ExportReport:
    """Writes a SavedModel that looks up and computes as `model` does.

    It holds what inference needs, the weights and tables but no optimizer
    slots, and runs on CPU in any process that has TensorFlow: neither Keras
    nor this package is imported there. Tables trained on SparseCores and
    models trained by several replicas are exported as well; of replicas, the
    first one's values. Ids outside their tables are treated as by `model`:
    reported, or dropped, though not counted.

    Its signature `"serving_default"` takes each input by name and gives each
    output by name. The name is the key of a dict of inputs, else the name of
    the `keras.Input` (`"inputs"` or `"input_0"`, ... without one); keys of
    nested structures are joined by `_`, and characters other than letters and
    digits become `_`. A dense input has that name; a ragged one is
    `<name>_values` and `<name>_row_splits`; a sparse one is `<name>_indices`,
    `<name>_values` and `<name>_dense_shape`. Outputs are named alike,
    `"output_0"`, ... if they have no keys.

    Keras' own `model.export` turns ragged and sparse inputs into dense ones
    without a word.

    Args:
        model: A built Keras model, or a layer.
        directory: Where to, on this machine; it appears whole or not at all.
        signature: The inputs of a model that does not know them (all but
            functional and Sequential ones), or other specs than its own:
            `tf.TensorSpec`, `tf.RaggedTensorSpec`, `tf.SparseTensorSpec` or
            `keras.Input`, with the batch, in the structure in which the
            model takes its inputs (the first argument of its call).
        row_dtype: `"float32"`: every table in its own dtype, exact.
            `"float16"` or `"bfloat16"`: the rows of every table of a
            `DistributedEmbedding` or `EmbedReduce` take half the memory, and
            are cast back when they are read.

    Returns:
        What was written. Print it for the names of the signature.

    Raises:
        FileExistsError: `directory` exists and is not empty.
        TypeError: no Keras model, or a leaf of `signature` that is no spec.
        ValueError: a model that is not built or does not know its inputs, two
            inputs or outputs of one name, an unknown `row_dtype`, or values
            too large for it.
        RuntimeError: called inside the scope of a strategy.

    Example:

    ```python
    import tempfile
    import keras
    import tensorflow as tf
    import tf_distembed as tde

    movie = tde.TableConfig("movie", 100, 4)
    seen = keras.Input([None], dtype="int64", ragged=True, name="seen")
    layer = tde.DistributedEmbedding(tde.FeatureConfig("seen", movie))
    model = keras.Model(seen, keras.layers.Dense(1)(layer(seen)))

    directory = tempfile.mkdtemp()
    print(tde.export_for_serving(model, directory))
    served = tf.saved_model.load(directory).signatures["serving_default"]
    outputs = served(
        seen_values=tf.constant([7, 7, 5], tf.int64),
        seen_row_splits=tf.constant([0, 3, 3], tf.int64),
    )
    assert outputs["output_0"].shape == (2, 1)
    ```
    """
    _check(model, row_dtype)
    target = _target(directory)
    structure, inputs = served_inputs(model, signature)
    tables = [
        table
        for layer in _embedding_layers(model)
        for table in _served_tables(layer, row_dtype)
    ]
    function = _trace(model, structure, inputs, tables)
    _check_tables_are_read(function, tables)
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        tf.saved_model.save(
            _module(model, function),
            str(beside),
            signatures={SIGNATURE: function},
            options=tf.saved_model.SaveOptions(
                experimental_custom_gradients=False
            ),
        )
        report = _report(target, beside, function, tables)
        # Onto an empty directory or none: atomic either way.
        beside.rename(target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return report


@dataclasses.dataclass(frozen=True)
class _Table:
    """A table as it is served.

    Attributes:
        layer: Its layer.
        name: Its name.
        variable: Holds its rows, one device's variable.
        own: The variable of the layer it was copied from; None: it is that
            variable itself, or has no such variable.
        dtype: Dtype of the rows that the layer reads.
    """

    layer: Any
    name: str
    variable: tf.Variable
    own: tf.Variable | None
    dtype: str

    def rows(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.gather(self.variable, ids), self.dtype)


def _check(model: Any, row_dtype: str) -> None:
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            "export_for_serving takes a Keras model or layer. Received: "
            f"{model!r} (of type {type(model).__name__})"
        )
    if row_dtype not in ROW_DTYPES:
        raise ValueError(
            f"row_dtype must be one of {list(ROW_DTYPES)}. "
            f"Received: {row_dtype!r}"
        )
    if tf.distribute.has_strategy():
        raise RuntimeError(
            "export_for_serving must be called outside strategy.scope() and "
            "strategy.run: it writes one copy of the model, for one device."
        )
    if not model.built:
        raise ValueError(
            f"'{model.name}' is not built, so it has no weights to export. "
            "Call it on a batch, or fit it, first."
        )


def _target(directory: str | pathlib.Path) -> pathlib.Path:
    if "://" in str(directory):
        raise ValueError(
            "export_for_serving writes to this machine; copy the directory "
            f"from there. Received: {directory!r}"
        )
    target = pathlib.Path(directory)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(
            f"'{target}' exists and is not an empty directory. Choose another "
            "one; servers take the highest number in a directory of versions."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _embedding_layers(model: Any) -> list[Any]:
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, (DistributedEmbedding, EmbedReduce))
    ]


def _served_tables(layer: Any, row_dtype: str) -> list[_Table]:
    if isinstance(layer, EmbedReduce):
        values = layer.embeddings
        own = None
        if isinstance(values, keras.Variable):
            own = components(values.value)[0]
            values = own
        shape = (layer.input_dim, layer.output_dim)
        dtype = tf.as_dtype(values.dtype).name

        def blocks() -> Iterator[tuple[int, np.ndarray]]:
            for start in range(0, shape[0], BLOCK_ROWS):
                stop = min(start + BLOCK_ROWS, shape[0])
                rows = tf.gather(values, tf.range(start, stop))
                yield start, np.asarray(rows)

        return [
            _served_table(
                layer, "embeddings", shape, dtype, row_dtype, own, blocks
            )
        ]
    state = layer.table_state()
    return [
        _served_table(
            layer,
            entry.table,
            entry.shape,
            entry.dtype,
            row_dtype,
            state.values_variable(entry.table),
            functools.partial(state.read_blocks, entry),
        )
        for entry in state.entries()
        if entry.slot == VALUES
    ]


def _served_table(
    layer: Any,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    row_dtype: str,
    own: tf.Variable | None,
    blocks: Callable[[], Iterator[tuple[int, np.ndarray]]],
) -> _Table:
    stored = dtype if row_dtype == "float32" else row_dtype
    if stored == dtype and own is not None:
        return _Table(layer, name, own, None, dtype)
    with tf.device("CPU:0"):
        variable = tf.Variable(tf.zeros(shape, stored), trainable=False)
        for start, values in blocks():
            rows = tf.cast(values, stored)
            if not np.array_equal(np.isfinite(values), tf.math.is_finite(rows)):
                raise ValueError(
                    f"Layer '{layer.name}', table '{name}': rows hold values "
                    f"of up to {np.max(np.abs(values)):.3g}, more than "
                    f"row_dtype='{row_dtype}' can hold "
                    f"({tf.as_dtype(stored).max}). Use 'bfloat16' or "
                    "'float32'."
                )
            write_rows(variable, tf.range(start, start + len(values)), rows)
    return _Table(layer, name, variable, own, dtype)


def _trace(
    model: Any,
    structure: Any,
    inputs: list[ServedInput],
    tables: list[_Table],
) -> Any:
    """The concrete function of the signature."""

    def serve(**tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        values = [one.assemble(tensors) for one in inputs]
        outputs = model(structures.pack(structure, values), training=False)
        return flat_outputs(outputs)

    specs = {name: s for one in inputs for name, s in one.specs().items()}
    with contextlib.ExitStack() as stack:
        for layer in dict.fromkeys(table.layer for table in tables):
            rows = {t.name: t.rows for t in tables if t.layer is layer}
            one_table = isinstance(layer, EmbedReduce)
            readers = rows["embeddings"] if one_table else rows
            stack.enter_context(layer.reading_rows(readers))
        # As Keras runs models, without autograph.
        function = tf.function(serve, autograph=False)
        return function.get_concrete_function(**specs)


def _check_tables_are_read(function: Any, tables: list[_Table]) -> None:
    """Raises if a table was read past the copy that is to be served."""
    captured = {id(variable) for variable in function.variables}
    for table in tables:
        if id(table.own) in captured and id(table.variable) not in captured:
            raise ValueError(
                f"Table '{table.name}' of layer '{table.layer.name}' is read "
                "by a tf.function that was traced before, and cannot be "
                "exported with another row_dtype. Make the model's call no "
                "tf.function of its own, or export before it is first called."
            )


def _module(model: Any, function: Any) -> tf.Module:
    """What the SavedModel saves: the variables of `function`, and no more."""
    module = tf.Module()
    module.weights = list(function.variables)
    # Lookup tables of strings and the like, with their files.
    module.resources = [
        child
        for child in tf.train.TrackableView(model).descendants()
        if isinstance(child, tf.saved_model.experimental.TrackableResource)
    ]
    return module


def _report(
    target: pathlib.Path,
    written: pathlib.Path,
    function: Any,
    tables: list[_Table],
) -> ExportReport:
    captured = {id(variable): variable for variable in function.variables}
    served = [
        t for t in tables if captured.pop(id(t.variable), None) is not None
    ]
    return ExportReport(
        directory=str(target),
        signature=SIGNATURE,
        inputs=_tensors(function.structured_input_signature[1]),
        outputs=_tensors(function.structured_outputs),
        tables=tuple(
            ExportedTable(
                layer=table.layer.name,
                table=table.name,
                rows=table.variable.shape[0],
                dim=table.variable.shape[1],
                dtype=table.variable.dtype.name,
                bytes=_bytes(table.variable),
            )
            for table in served
        ),
        other_bytes=sum(_bytes(one) for one in captured.values()),
        disk_bytes=sum(
            file.stat().st_size for file in written.rglob("*") if file.is_file()
        ),
    )


def _tensors(specs: Mapping[str, tf.TensorSpec]) -> tuple[ServedTensor, ...]:
    return tuple(
        ServedTensor(
            name,
            spec.dtype.name,
            None if spec.shape.rank is None else tuple(spec.shape.as_list()),
        )
        for name, spec in specs.items()
    )


def _bytes(variable: tf.Variable) -> int:
    return variable.shape.num_elements() * variable.dtype.size
