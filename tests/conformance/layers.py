"""The real layer of merged cases, with real optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import tf_distembed as tde
from tests.conformance.cases import Layer, Optimizer
from tests.conformance.registry import NAMES, OPTIMIZERS

_NATIVE = tf.tpu.experimental.embedding

_MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("keras", "sgd"): keras.optimizers.SGD,
    ("keras", "momentum"): keras.optimizers.SGD,
    ("keras", "adagrad"): keras.optimizers.Adagrad,
    ("keras", "adam"): keras.optimizers.Adam,
    ("keras", "ftrl"): keras.optimizers.Ftrl,
    ("native", "sgd"): _NATIVE.SGD,
    ("native", "native_adagrad"): _NATIVE.Adagrad,
    ("native", "native_adagrad_momentum"): _NATIVE.AdagradMomentum,
    ("native", "native_adam"): _NATIVE.Adam,
    ("native", "native_ftrl"): _NATIVE.FTRL,
}


def make_optimizer(name: str) -> Any:
    """The real optimizer of a key of OPTIMIZERS; None if a table has none."""
    optimizer = OPTIMIZERS[name]
    if optimizer.maker == "name":
        return NAMES[name]
    if optimizer.maker == "model":
        return None
    return made(optimizer, optimizer.maker)


def made(optimizer: Optimizer, maker: str) -> Any:
    """The real optimizer, of the kind that a maker of `_MAKERS` makes."""
    settings = dict(optimizer.settings)
    if isinstance(settings["learning_rate"], dict):
        settings["learning_rate"] = keras.optimizers.schedules.ExponentialDecay(
            **settings["learning_rate"]
        )
    if optimizer.slots.get("accumulator"):
        settings["initial_accumulator_value"] = optimizer.slots["accumulator"]
    return _MAKERS[maker, optimizer.rule](**settings)


def make_layer(
    layer: Layer, default_optimizer: str, batch: int | None = None
) -> Any:
    """One DistributedEmbedding with all features of all the layer's cases.

    Args:
        layer: the merged cases.
        default_optimizer: key into OPTIMIZERS.
        batch: rows that features without an output shape declare.
    """
    # One object an optimizer, as users write it: tables of one width that
    # share the object are stacked.
    optimizers: dict[str, Any] = {}

    def optimizer_of(name: str) -> Any:
        if name not in optimizers:
            optimizers[name] = make_optimizer(name)
        return optimizers[name]

    tables = {
        table.name: tde.TableConfig(
            name=table.name,
            vocabulary_size=table.vocabulary,
            embedding_dim=table.dim,
            optimizer=optimizer_of(table.optimizer or default_optimizer),
            combiner=table.combiner,
            trainable=table.trainable,
        )
        for table in layer.tables
    }
    features = {
        feature.name: tde.FeatureConfig(
            name=feature.name,
            table=tables[feature.table],
            input_shape=feature.input_shape,
            output_shape=feature.output_shape
            or (batch and (batch, tables[feature.table].embedding_dim)),
        )
        for feature in layer.features
    }
    return tde.DistributedEmbedding(
        features,
        invalid_ids={f.name: f.invalid_ids for f in layer.features},
        **layer.settings,
    )
