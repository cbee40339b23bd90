"""The layer's arguments: checked, written to a config, and read back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_distembed import (
    initial_values,
    native_configs,
    row_optimizers,
    structures,
)
from tf_distembed.config import FeatureConfig, TableConfig
from tf_distembed.features import Feature


@dataclasses.dataclass
class Settings:
    """The layer's arguments other than `feature_configs`."""

    table_stacking: Any
    invalid_ids: Any
    update_stats: bool
    optimizer: Any
    pipeline_execution_with_tensor_core: bool
    sparse_core_embedding_config: Any

    def __post_init__(self) -> None:
        # What the user changes later changes nothing here.
        self.table_stacking = copy.deepcopy(self.table_stacking)
        self.invalid_ids = copy.deepcopy(self.invalid_ids)
        for field in ("update_stats", "pipeline_execution_with_tensor_core"):
            value = getattr(self, field)
            if not isinstance(value, bool):
                raise TypeError(
                    f"{field} must be True or False. Received: {value!r} (of "
                    f"type {type(value).__name__})"
                )
        row_optimizers.check_optimizer(self.optimizer, "The layer's optimizer")

    def check_without_sparsecore(self) -> None:
        """Raises for a setting that only tables on SparseCores can honour."""
        for field in (
            "update_stats",
            "pipeline_execution_with_tensor_core",
            "sparse_core_embedding_config",
        ):
            if value := getattr(self, field):
                raise ValueError(
                    f"{field}={value!r} needs a table with placement "
                    "'sparsecore'; every table of this layer is on the "
                    "default device. Leave it out here."
                )


def feature_leaves(
    feature_configs: Any, reserved: str, variable_dtype: str
) -> list[tuple[structures.Path, FeatureConfig]]:
    """(path, configuration) of every feature, in flat order.

    Native `tf.tpu.experimental.embedding` configurations come back as ours.

    Raises:
        TypeError: a leaf that is no `FeatureConfig`.
        ValueError: no feature at all, or one with the reserved name.
    """
    leaves = native_configs.translate(
        structures.flatten(feature_configs), variable_dtype
    )
    if not leaves:
        raise ValueError(
            "feature_configs must hold at least one FeatureConfig. "
            f"Received: {feature_configs!r}"
        )
    for path, leaf in leaves:
        if not isinstance(leaf, FeatureConfig):
            at = f" at {path}" if path else ""
            raise TypeError(
                f"feature_configs must be a nested structure of FeatureConfig."
                f" Received{at}: {leaf!r} (of type {type(leaf).__name__})"
            )
        if reserved in (leaf.name, *path):
            raise ValueError(
                f"A feature may not be named '{reserved}', which marks the "
                f"result of preprocess. Received it at {path}."
            )
    return leaves


def table_optimizers(
    tables: Sequence[TableConfig], default: Any
) -> dict[str, Any]:
    """Table name -> the optimizer object in use, or None.

    The layer's own copy of a table whose optimizer is None gets the layer's.
    Given as a name or a config, each table has one of its own.
    """
    optimizers = {}
    for table in tables:
        if table.optimizer is None:
            table.optimizer = default
        where = f"Table '{table.name}'"
        optimizers[table.name] = (
            None
            if table.optimizer is None
            else row_optimizers.make_optimizer(table.optimizer, where)
        )
    return optimizers


def rows_and_values(
    name: str, given: Any, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Any, Any]:
    """(row ids or None for all rows, values) of a change to one table.

    Raises:
        ValueError: an unknown table, a wrong shape or row id.
    """
    if name not in shapes:
        raise ValueError(
            f"There is no table '{name}'. The tables are {sorted(shapes)}."
        )
    vocabulary_size, dim = shapes[name]
    if not isinstance(given, tuple):
        values = _numbers(name, given)
        if tuple(values.shape) != (vocabulary_size, dim):
            raise ValueError(
                f"Table '{name}': values must have the shape "
                f"{(vocabulary_size, dim)}. Received: {tuple(values.shape)}"
            )
        return None, values
    if len(given) != 2:
        raise ValueError(
            f"Table '{name}': give an array, or a tuple (row ids, values). "
            f"Received: a tuple of {len(given)}"
        )
    ids, values = np.asarray(given[0]), _numbers(name, given[1])
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"Table '{name}': row ids must be integers of shape [R]. "
            f"Received: shape {ids.shape}, dtype {ids.dtype}"
        )
    if tuple(values.shape) != (len(ids), dim):
        raise ValueError(
            f"Table '{name}': values of {len(ids)} rows must have the shape "
            f"{(len(ids), dim)}. Received: {tuple(values.shape)}"
        )
    outside = ids[(ids < 0) | (ids >= vocabulary_size)]
    if outside.size or len(np.unique(ids)) != len(ids):
        raise ValueError(
            f"Table '{name}': row ids must be distinct and run from 0 to "
            f"{vocabulary_size - 1}. Received: {ids.tolist()[:20]}"
        )
    return tf.constant(ids.astype(np.int64)), values


def _numbers(name: str, values: Any) -> Any:
    """An array or tensor of numbers; checked before anything is set."""
    if not hasattr(values, "shape"):
        values = np.asarray(values)
    if not initial_values.is_numeric(values.dtype):
        raise TypeError(
            f"Table '{name}': values must be floats or integers. "
            f"Received: dtype={values.dtype}"
        )
    return values


def encode(
    structure: Any,
    features: Sequence[Feature],
    in_use: Mapping[str, Any],
    settings: Settings,
) -> dict[str, Any]:
    """The layer's arguments as values that Keras can write as JSON.

    Each table stands once, and so does an optimizer object that several
    tables share: a table names its own by number. An optimizer given by name
    or config stays one, with the settings in use now.
    """
    optimizers: list[Any] = []
    tables: dict[str, dict[str, Any]] = {}
    for feature in features:
        table = feature.table
        if table.name in tables:
            continue
        config = dataclasses.replace(table, optimizer=None).get_config()
        optimizer = row_optimizers.as_given(in_use.get(table.name))
        if optimizer is None:  # not trained by itself: what it was given
            optimizer = table.optimizer
        if isinstance(table.optimizer, (str, Mapping)):
            config["optimizer"] = _without_name(optimizer)
        else:
            config["optimizer"] = _number(optimizer, optimizers)
        tables[table.name] = config
    return {
        "feature_configs": structures.encode(
            structures.pack(structure, range(len(features)))
        ),
        "features": [
            {
                "name": feature.name,
                "table": feature.table.name,
                "input_shape": _as_list(feature.input_shape),
                "output_shape": _as_list(feature.output_shape),
            }
            for feature in features
        ],
        "tables": list(tables.values()),
        "optimizers": [
            row_optimizers.serialize(one, "An optimizer of this layer")
            for one in optimizers
        ],
        "table_stacking": copy.deepcopy(settings.table_stacking),
        "invalid_ids": copy.deepcopy(settings.invalid_ids),
        "update_stats": settings.update_stats,
        "pipeline_execution_with_tensor_core": (
            settings.pipeline_execution_with_tensor_core
        ),
        "sparse_core_embedding_config": settings.sparse_core_embedding_config,
    }


def decode(config: Mapping[str, Any]) -> dict[str, Any]:
    """The layer's arguments from what `encode` returned; it stays as it is."""
    config = dict(config)
    # Keras writes into the config of an optimizer that it reads.
    for key in ("optimizers", "tables"):
        config[key] = copy.deepcopy(config[key])
    optimizers = [
        row_optimizers.deserialize(one) for one in config.pop("optimizers")
    ]
    tables = {}
    for table in config.pop("tables"):
        optimizer = table["optimizer"]
        if isinstance(optimizer, int):
            optimizer = optimizers[optimizer]
        one = TableConfig.from_config({**table, "optimizer": None})
        one.optimizer = optimizer
        tables[one.name] = one
    features = [
        FeatureConfig.from_config({**one, "table": tables[one["table"]]})
        for one in config.pop("features")
    ]
    config["feature_configs"] = structures.map_leaves(
        structures.decode(config["feature_configs"]), lambda i: features[i]
    )
    return config


def _number(optimizer: Any, optimizers: list[Any]) -> int | None:
    if optimizer is None:
        return None
    for number, known in enumerate(optimizers):
        if known is optimizer:
            return number
    optimizers.append(optimizer)
    return len(optimizers) - 1


def _without_name(optimizer: Any) -> Any:
    """A config that is equal for optimizers of equal settings."""
    config = row_optimizers.serialize(optimizer, "An optimizer of this layer")
    if isinstance(config, str):
        return config
    settings = dict(config.get("config", {}))
    settings.pop("name", None)
    return {"class_name": config["class_name"], "config": settings}


def _as_list(shape: Any) -> list[int | None] | None:
    return None if shape is None else list(shape)
