"""Native `tf.tpu.experimental.embedding` configurations, read as our own.

`tf.tpu.experimental.embedding.FeatureConfig` may stand in `feature_configs`
wherever a `FeatureConfig` may, on every device, also beside our own. It is
translated when the layer is made; `get_config` writes our own form. Each field
is honoured, or raises a ValueError that names it:

| `TableConfig` field   | here                                                 |
|-----------------------|------------------------------------------------------|
| `vocabulary_size`     | `vocabulary_size`                                    |
| `dim`                 | `embedding_dim`                                      |
| `initializer`         | TensorFlow's own laws become Keras' of the same law  |
|                       | and parameters, drawn in blocks; so does the default,|
|                       | a truncated normal of deviation `1/sqrt(dim)`. Any   |
|                       | other callable, of the shape or of shape and dtype,  |
|                       | is drawn whole on the host                           |
| `optimizer`           | the table's own, with the native formula. None: the  |
|                       | layer's `optimizer=`, else the model's optimizer     |
|                       | trains the table, as any table with `optimizer=None` |
| `combiner`            | `"mean"`, `"sum"`, `"sqrtn"`; a `CustomCombiner`     |
|                       | raises                                               |
| `name`                | `name`; None: `<feature>_table`, after the first     |
|                       | feature that uses the table                          |
| `quantization_config` | anything but None raises                             |
| `layout`              | anything but None raises: layouts are computed       |
| `dtype`               | float32, which the layer's variable dtype must be    |
|                       | too; any other raises                                |

| `FeatureConfig` field          | here                                        |
|--------------------------------|---------------------------------------------|
| `table`                        | one object is one table, shared             |
| `max_sequence_length`          | 0: combined. S > 0: `[B, S, dim]`, ids fill |
|                                | positions in order, longer rows cut         |
| `validate_weights_and_indices` | True: the layer's rules on ids and weights. |
|                                | False, a lookup without checks, raises      |
| `output_shape`                 | of one replica, without `dim`: `[B]` is     |
|                                | combined, `[B, S]` gives `[B, S, dim]`; a   |
|                                | `max_sequence_length` beside it must agree  |
| `name`                         | `name`; None: the keys of its path, joined  |
|                                | by `_`                                      |

A generated name that is taken gets `_2`, `_3`, ... in the order of features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_distembed.config import FeatureConfig, TableConfig

Path = tuple[Any, ...]

_native = tf.tpu.experimental.embedding
_PREFIX = "tf.tpu.experimental.embedding"


def translate(
    leaves: Sequence[tuple[Path, Any]], variable_dtype: str
) -> list[tuple[Path, Any]]:
    """The same leaves, native configurations replaced by our own.

    Args:
        leaves: (path, configuration) of every feature, in flat order.
        variable_dtype: Name of the dtype of the layer's variables.

    Raises:
        ValueError: a field that this layer cannot honour.
    """
    feature_names = _Names(
        leaf.name
        for _, leaf in leaves
        if isinstance(leaf, (FeatureConfig, _native.FeatureConfig))
    )
    table_names = _Names(
        leaf.table.name
        for _, leaf in leaves
        if isinstance(leaf, (FeatureConfig, _native.FeatureConfig))
    )
    tables: dict[int, TableConfig] = {}
    translated: list[tuple[Path, Any]] = []
    for path, leaf in leaves:
        if isinstance(leaf, _native.FeatureConfig):
            name = leaf.name
            if name is None:
                name = feature_names.new(_joined(path) or "feature")
            if id(leaf.table) not in tables:
                table_name = leaf.table.name
                if table_name is None:
                    table_name = table_names.new(f"{name}_table")
                tables[id(leaf.table)] = _table(
                    leaf.table, table_name, variable_dtype
                )
            leaf = _feature(leaf, name, tables[id(leaf.table)])
        translated.append((path, leaf))
    return translated


class _Names:
    """Hands out names that nothing else has."""

    def __init__(self, given: Any) -> None:
        self._taken = set(given)

    def new(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self._taken:
            number += 1
            name = f"{wanted}_{number}"
        self._taken.add(name)
        return name


def _joined(path: Path) -> str:
    # Names may not contain "/": files and layers are named after them.
    return "_".join(str(key).replace("/", "_") for key in path)


def _table(native: Any, name: str, variable_dtype: str) -> TableConfig:
    def refuse(field: str, why: str) -> None:
        raise ValueError(
            f"Table '{name}': {_PREFIX}.TableConfig has {field}="
            f"{getattr(native, field)!r}. {why}"
        )

    if not isinstance(native.combiner, str):
        refuse("combiner", "Only 'mean', 'sum' and 'sqrtn' are supported.")
    if native.quantization_config is not None:
        refuse("quantization_config", "It is not supported; leave it out.")
    if native.layout is not None:
        refuse("layout", "The layer computes layouts itself; leave it out.")
    if native.dtype != tf.float32:
        refuse("dtype", "Tables hold floats; use tf.float32.")
    if variable_dtype != "float32":
        refuse(
            "dtype",
            f"The layer's dtype makes variables of {variable_dtype}. Use a "
            "layer dtype whose variables are float32, such as 'float32' or "
            "'mixed_bfloat16', or a tf_distembed.TableConfig, whose table has "
            "the layer's dtype.",
        )
    return TableConfig(
        name=name,
        vocabulary_size=native.vocabulary_size,
        embedding_dim=native.dim,
        initializer=_initializer(native.initializer, name),
        optimizer=native.optimizer,
        combiner=native.combiner,
    )


def _feature(native: Any, name: str, table: TableConfig) -> FeatureConfig:
    def refuse(field: str, why: str) -> None:
        raise ValueError(
            f"Feature '{name}': {_PREFIX}.FeatureConfig has {field}="
            f"{getattr(native, field)!r}. {why}"
        )

    if not native.validate_weights_and_indices:
        refuse(
            "validate_weights_and_indices",
            "There is no lookup without checks; leave it at True. What "
            "becomes of ids outside the table, invalid_ids says.",
        )
    length = native.max_sequence_length
    output_shape: list[int | None] | None = None
    if native.output_shape.rank is not None:
        output_shape = native.output_shape.as_list()
        if len(output_shape) not in (1, 2):
            refuse(
                "output_shape",
                "It must be [batch], or [batch, positions] for an output of "
                "each position, without the table's dim.",
            )
        if length and output_shape[1:] != [length]:
            refuse(
                "output_shape",
                f"Beside it stands max_sequence_length={length}, which gives "
                f"[batch, {length}]. Leave one of them out.",
            )
        # One replica's batch there, the global one here.
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if output_shape[0] is not None:
            output_shape[0] *= replicas
    elif length:
        output_shape = [None, length]
    if output_shape is not None:
        output_shape.append(table.embedding_dim)
    return FeatureConfig(name=name, table=table, output_shape=output_shape)


def _initializer(native: Any, table: str) -> Any:
    """Keras' initializer of the same law, or one that calls `native`."""
    if isinstance(native, keras.initializers.Initializer):
        return native
    law = _laws().get(type(native))
    if law is not None:
        return law(**native.get_config())
    if isinstance(native, _native.RowIdInitializer):
        return _RowIds(native.offset)
    if "shard_info" in _required(native):
        raise ValueError(
            f"Table '{table}': {_PREFIX}.TableConfig has initializer="
            f"{native!r}, which needs shard_info. Here a callable draws the "
            "whole table at once; give shard_info a default."
        )
    return _Called(native)


def _laws() -> dict[type, Any]:
    # The class of the default has no public name.
    default = _native.TableConfig(1, 1, name="default").initializer
    return {
        type(default): keras.initializers.TruncatedNormal,
        tf.random_normal_initializer: keras.initializers.RandomNormal,
        tf.random_uniform_initializer: keras.initializers.RandomUniform,
        tf.constant_initializer: keras.initializers.Constant,
        tf.zeros_initializer: keras.initializers.Zeros,
        tf.ones_initializer: keras.initializers.Ones,
    }


def _required(function: Callable[..., Any]) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty
    ]


@keras.saving.register_keras_serializable(package="tf_distembed")
class _Called(keras.initializers.Initializer):
    """Calls a function of the shape, or of shape and dtype."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        parameters = inspect.signature(self.function).parameters
        takes_any = any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD
            for parameter in parameters.values()
        )
        if "dtype" in parameters or takes_any:
            return self.function(shape, dtype=tf.as_dtype(dtype or "float32"))
        return self.function(shape)

    def get_config(self) -> dict[str, Any]:
        return {"function": keras.saving.serialize_keras_object(self.function)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _Called:
        return cls(keras.saving.deserialize_keras_object(config["function"]))


@keras.saving.register_keras_serializable(package="tf_distembed")
class _RowIds(keras.initializers.Initializer):
    """Every entry of row `i` is `offset + i`."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        rows = _native.RowIdInitializer(self.offset)
        return rows(shape, tf.as_dtype(dtype or "float32"))

    def get_config(self) -> dict[str, Any]:
        return {"offset": self.offset}
