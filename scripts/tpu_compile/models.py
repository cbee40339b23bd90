"""The training steps that are compiled for a TPU.

Small tables, since the compiler looks at shapes and not at values, but every
part that a recommender's step has: features of each kind, shared and stacked
tables, both of the TPU's placements, a tower of the model's own optimizer.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_distembed as tde

K = keras.optimizers

#: Examples of the global batch.
BATCH = 64
ITEMS, BRANDS, USERS, HOURS = 4000, 700, 10000, 24

#: Feature -> (kind, rows of its table, ids an example).
SPARSECORE_INPUTS = {
    "seen": ("ragged", ITEMS, None),
    "next": ("dense", ITEMS, None),
    "brands": ("weighted", BRANDS, None),
    "user": ("dense", USERS, 2),
    "hour": ("dense", HOURS, 1),
}
DEFAULT_DEVICE_INPUTS = {
    "next": ("dense", ITEMS, None),
    "brand": ("dense", BRANDS, 3),
    "user": ("dense", USERS, 2),
    "hour": ("dense", HOURS, 1),
}


def sparsecore_layer(max_ids: int = 256) -> tde.DistributedEmbedding:
    """Two stacks on SparseCores, and a table on the TensorCore.

    `item` and `brand` share an Adam whose learning rate follows its counter,
    and so a stack; `user` has Adagrad.

    Args:
        max_ids: The limit of ids, and of distinct ids, that `user` may have
            in one partition.
    """
    adam = K.Adam(K.schedules.ExponentialDecay(0.01, 100, 0.9))
    item = tde.TableConfig("item", ITEMS, 16, optimizer=adam)
    brand = tde.TableConfig(
        "brand", BRANDS, 16, optimizer=adam, combiner="sqrtn"
    )
    user = tde.TableConfig(
        "user",
        USERS,
        8,
        optimizer=K.Adagrad(0.1),
        combiner="sum",
        max_ids_per_partition=max_ids,
        max_unique_ids_per_partition=max_ids,
    )
    hour = tde.TableConfig(
        "hour", HOURS, 4, optimizer="adagrad", placement="default_device"
    )
    return _layer(
        SPARSECORE_INPUTS,
        {"seen": item, "next": item, "brands": brand, "user": user}
        | {"hour": hour},
    )


def default_device_layer() -> tde.DistributedEmbedding:
    """What a TPU without SparseCores gets: every table on the TensorCore.

    One of them is trained by the model's optimizer.
    """
    adam = K.Adam(K.schedules.ExponentialDecay(0.01, 100, 0.9))
    item = tde.TableConfig("item", ITEMS, 16, optimizer=adam)
    brand = tde.TableConfig("brand", BRANDS, 16, optimizer=adam)
    user = tde.TableConfig(
        "user", USERS, 8, optimizer=K.Adagrad(0.1), combiner="sum"
    )
    hour = tde.TableConfig("hour", HOURS, 4)
    return _layer(
        DEFAULT_DEVICE_INPUTS,
        {"next": item, "brand": brand, "user": user, "hour": hour},
    )


def _layer(inputs: Any, tables: Any) -> tde.DistributedEmbedding:
    return tde.DistributedEmbedding(
        {
            name: tde.FeatureConfig(
                name,
                tables[name],
                (BATCH,)
                if kind == "dense" and width is None
                # Other kinds have any number of ids an example.
                else (BATCH, width),
            )
            for name, (kind, _, width) in inputs.items()
        }
    )


class Model(keras.Model):
    """`(ids, weights of some features)` -> one number an example.

    Args:
        embedding: Looks up the ids.
        uses_strings: Whether to do what no TPU can, on the way.
    """

    def __init__(
        self, embedding: tde.DistributedEmbedding, uses_strings: bool = False
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.uses_strings = uses_strings
        self.concatenate = keras.layers.Concatenate()
        self.tower = keras.Sequential(
            [keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
        )

    def call(self, inputs: Any) -> tf.Tensor:
        """Looks up, concatenates, two dense layers."""
        ids, weights = inputs
        found = self.embedding(ids, dict.fromkeys(ids) | weights)
        if self.uses_strings:
            name = min(found)
            text = tf.strings.as_string(found[name])
            found = found | {name: tf.strings.to_number(text)}
        return self.tower(self.concatenate([found[k] for k in sorted(found)]))


def compiled_model(
    embedding: tde.DistributedEmbedding, uses_strings: bool = False
) -> Model:
    """A model with its loss, and the optimizer of its dense weights."""
    model = Model(embedding, uses_strings)
    model.compile(K.Adam(1e-3), "mse", jit_compile=False)
    return model


def batches(inputs: Any) -> tf.data.Dataset:
    """Global batches for a model, the same one again and again."""
    rng = np.random.default_rng(0)
    ids: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for name, (kind, rows, width) in inputs.items():
        if kind == "dense":
            shape = (BATCH,) if width is None else (BATCH, width)
            ids[name] = rng.integers(0, rows, shape)
            continue
        lengths = rng.integers(0, 4, BATCH)
        ids[name] = tf.RaggedTensor.from_row_lengths(
            tf.constant(rng.integers(0, rows, lengths.sum())), lengths
        )
        if kind == "weighted":
            weight = rng.uniform(0.5, 2.0, lengths.sum()).astype("float32")
            weights[name] = ids[name].with_values(tf.constant(weight))
    labels = np.zeros((BATCH, 1), "float32")
    examples = tf.data.Dataset.from_tensor_slices(((ids, weights), labels))
    return examples.repeat().batch(BATCH, drop_remainder=True)
