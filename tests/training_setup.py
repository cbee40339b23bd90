"""Models and batches for the tests of strategies, step helpers and `fit`.

Three features of two tables: one dense, one ragged or sparse with weights, one
dense with two ids an example. All kinds hold the same ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_distembed as tde
from tests import state_formats

K = keras.optimizers
ITEMS, USERS, DIM = 30, 12, 4
WEIGHTED = {"ragged", "sparse"}


def layer(
    batch: int | None = None,
    optimizer: Callable[[], Any] = lambda: K.Adagrad(0.1),
    placement: str = "auto",
    user_optimizer: Any = "adam",
) -> tde.DistributedEmbedding:
    uniform = keras.initializers.RandomUniform
    item = tde.TableConfig(
        "item",
        ITEMS,
        DIM,
        optimizer=optimizer(),
        initializer=uniform(seed=1),
        placement=placement,
    )
    user = tde.TableConfig(
        "user",
        USERS,
        DIM,
        optimizer=user_optimizer,
        combiner="sum",
        initializer=uniform(seed=2),
        placement=placement,
    )
    return tde.DistributedEmbedding(
        {
            "next": tde.FeatureConfig("next", item, (batch,)),
            "seen": tde.FeatureConfig("seen", item, (batch, None)),
            "user": tde.FeatureConfig("user", user, (batch, 2)),
        }
    )


@contextlib.contextmanager
def under(
    name: str, mirrored: tf.distribute.Strategy | None = None
) -> Iterator[tf.distribute.Strategy]:
    """Enters "default", "mirrored" or "emulator<chips>x<cores>"."""
    if name.startswith("emulator"):
        chips, cores = map(int, name.removeprefix("emulator").split("x"))
        with tde.testing.sparsecore_emulator(chips, cores) as strategy:
            yield strategy
    elif name == "mirrored":
        assert mirrored is not None
        yield mirrored
    else:
        yield tf.distribute.get_strategy()


@keras.saving.register_keras_serializable("tests")
class Model(keras.Model):
    """A subclass model: (ids, weights) -> one number an example."""

    def __init__(self, embedding: keras.layers.Layer, units: int = 1) -> None:
        super().__init__()
        self.embedding = embedding
        self.concatenate = keras.layers.Concatenate()
        self.head = keras.layers.Dense(
            units, kernel_initializer=keras.initializers.RandomUniform(seed=5)
        )

    def call(self, inputs: Any) -> tf.Tensor:
        """Looks up, concatenates, one dense layer."""
        ids, weights = inputs
        found = self.embedding(ids, weights)
        return self.head(
            self.concatenate([found[k] for k in ("next", "seen", "user")])
        )


def model(batch: int | None = None, **settings: Any) -> Model:
    """A compiled model; its optimizer is SGD unless given."""
    made = Model(layer(batch))
    settings = {
        "optimizer": K.SGD(0.1),
        "loss": "mse",
        "metrics": ["mae"],
        "jit_compile": False,
    } | settings
    made.compile(**settings)
    return made


def arrays(rows: int, kind: str = "ragged", seed: int = 0) -> tuple[Any, Any]:
    """((ids, weights), labels) of some examples; some rows are empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, rows)
    lengths[rows // 3] = 0
    values = rng.integers(0, ITEMS, lengths.sum())
    weight = rng.normal(1.0, 0.5, lengths.sum()).astype("float32")
    seen: Any = tf.RaggedTensor.from_row_lengths(
        tf.constant(values, tf.int64), lengths
    )
    seen_weights: Any = seen.with_values(tf.constant(weight))
    next_ = rng.integers(0, ITEMS, rows)
    user = rng.integers(0, USERS, (rows, 2))
    labels = rng.normal(size=(rows, 1)).astype("float32")
    if kind == "sparse":
        seen, seen_weights = seen.to_sparse(), seen_weights.to_sparse()
    if kind == "dense":
        # As wide as the longest; a weight of 0 stands for no id.
        seen_weights = seen_weights.to_tensor(shape=(None, 3))
        seen = seen.to_tensor(shape=(None, 3))
    ids = {"next": next_, "seen": seen, "user": user}
    weights = {
        "next": np.ones(rows, "float32"),
        "seen": seen_weights,
        "user": np.ones((rows, 2), "float32"),
    }
    return (ids, weights), labels


def dataset(
    rows: int,
    batch: int,
    kind: str = "ragged",
    drop_remainder: bool = True,
    sample_weight: bool = False,
) -> tf.data.Dataset:
    elements: tuple[Any, ...] = arrays(rows, kind)
    if sample_weight:
        weights = np.random.default_rng(9).uniform(0.5, 2.0, rows)
        elements = (*elements, weights.astype("float32"))
    whole = tf.data.Dataset.from_tensor_slices(elements)
    return whole.batch(batch, drop_remainder=drop_remainder)


def state(embedding: tde.DistributedEmbedding) -> dict[str, np.ndarray]:
    """Tables, slots and step counts of a layer, by name."""
    return {
        key.replace(":", "/"): value
        for key, value in state_formats.tables_of(embedding).items()
    }


def model_state(model: keras.Model) -> dict[str, np.ndarray]:
    """What a training run leaves: layers, their tables, the optimizer."""
    found = state(model.embedding)
    for kind, variables in (
        ("head", model.head.variables),
        ("optimizer", model.optimizer.variables),
    ):
        for i, variable in enumerate(variables):
            found[f"{kind}/{i}"] = np.array(variable.numpy())
    return found


def assert_close(
    got: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float = 2e-5
) -> None:
    """Equal keys, in any order; says all entries that differ."""
    assert got.keys() == expected.keys()
    state_formats.assert_close(
        {key: np.asarray(got[key]) for key in expected}, expected, tolerance
    )


def assert_moved(got: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Every table's values have changed."""
    for key in before:
        if key.endswith("/values"):
            assert np.abs(got[key] - before[key]).max() > 1e-3, key
