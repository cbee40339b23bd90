"""What the training tests compare with: dense tables, trained by Keras.

A lookup here is a matrix product: the gains of a feature's ids `[B, V]` times
the table `[V, D]`. Its gradient is dense, with all uses of a row summed. Keras'
own optimizer takes the step; then the rows that no id touched are put back,
and so are their slots, which is all that "lazy" means.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde

State = dict[str, dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of the standard problem."""

    rows: int
    dim: int
    combiner: str
    code: int

    @property
    def values(self) -> np.ndarray:
        """Values that tell table, row and column; exact in bfloat16."""
        row = np.arange(1, self.rows + 1)[:, None]
        column = np.arange(self.dim)[None, :]
        return ((4 * row + column + self.code) / 64).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of the standard problem and what it is fed in each step."""

    table: str
    steps: Sequence[Sequence[Sequence[int]]]
    weights: Sequence[Sequence[Sequence[float]]] | None = None


#: Row 0 and the last row are touched late, rows 4 and 9 of "item" never.
TABLES = {
    "item": Table(11, 4, "mean", 0),
    "user": Table(6, 3, "sum", 8),
}
BATCH = 4
#: Ids repeat within a row, across rows and across features.
DENSE_FEATURES = {
    "next": Feature(
        "item",
        [[[3], [1], [3], [2]], [[1], [3], [5], [3]], [[10], [0], [3], [10]]],
    ),
    "pair": Feature(
        "item",
        [
            [[3, 3], [2, 6], [7, 1], [5, 3]],
            [[1, 2], [8, 8], [8, 3], [5, 1]],
            [[0, 0], [10, 7], [3, 7], [6, 2]],
        ],
    ),
    "user": Feature(
        "user",
        [
            [[1, 1], [2, 1], [1, 3], [4, 4]],
            [[2, 2], [3, 1], [1, 5], [4, 2]],
            [[5, 0], [0, 1], [2, 2], [1, 5]],
        ],
    ),
}
#: The same, and features whose rows have any length: empty ones first, in the
#: middle and last, a whole batch of them, and weights, some of them 0.
RAGGED_FEATURES = {
    **DENSE_FEATURES,
    "liked": Feature(
        "user",
        [
            [[1, 1, 3], [], [2], []],
            [[], [], [], []],
            [[], [0, 5], [2, 4, 2, 2], [5]],
        ],
    ),
    "seen": Feature(
        "item",
        [
            [[], [3, 8, 3], [7], []],
            [[], [], [], []],
            [[6, 6, 10], [], [0, 1], []],
        ],
        [
            [[], [1.0, 0.5, 2.0], [0.0], []],
            [[], [], [], []],
            [[0.5, 1.5, 1.0], [], [2.0, 0.25], []],
        ],
    ),
}
LABELS = [
    np.array([[1.0], [0.0], [2.0], [-1.0]], np.float32),
    np.array([[0.0], [1.0], [-1.0], [2.0]], np.float32),
    np.array([[2.0], [-2.0], [0.0], [1.0]], np.float32),
]
STEPS = len(LABELS)


def dense(rows: Sequence[Sequence], dtype: Any = tf.int64) -> tf.Tensor:
    return tf.constant(rows, dtype)


def ragged(rows: Sequence[Sequence], dtype: Any = tf.int64) -> tf.RaggedTensor:
    flat = tf.constant([value for row in rows for value in row], dtype)
    return tf.RaggedTensor.from_row_lengths(flat, [len(row) for row in rows])


def sparse(rows: Sequence[Sequence], dtype: Any = tf.int64) -> tf.SparseTensor:
    return ragged(rows, dtype).to_sparse()


def _kind(feature: Feature) -> Callable:
    lengths = {len(row) for step in feature.steps for row in step}
    return dense if len(lengths) == 1 else ragged


def batch_of(
    features: Mapping[str, Feature],
    step: int,
    part: slice = slice(None),
    kinds: Mapping[str, Callable] | None = None,
) -> tuple[dict[str, Any], dict[str, Any], tf.Tensor]:
    """(ids, weights, labels) of a step, for the rows `part` of the batch."""
    ids, weights = {}, {}
    for name, feature in features.items():
        kind = (kinds or {}).get(name, _kind(feature))
        ids[name] = kind(feature.steps[step][part])
        weights[name] = None
        if feature.weights is not None:
            weights[name] = kind(feature.weights[step][part], tf.float32)
    return ids, weights, tf.constant(LABELS[step][part])


def make_layer(
    features: Mapping[str, Feature] = DENSE_FEATURES,
    optimizers: Mapping[str, Any] | Any = None,
    *,
    tables: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> tde.DistributedEmbedding:
    """The layer of the standard problem.

    Args:
        features: What it is fed.
        optimizers: table -> its own optimizer, or one for all of them.
        tables: table -> further settings of its TableConfig.
        **settings: arguments of the layer.
    """
    configs = {
        name: tde.TableConfig(
            name,
            table.rows,
            table.dim,
            combiner=table.combiner,
            initializer=table.values,
            optimizer=optimizers[name]
            if isinstance(optimizers, Mapping)
            and "class_name" not in optimizers
            else optimizers,
            **(tables or {}).get(name, {}),
        )
        for name, table in TABLES.items()
    }
    return tde.DistributedEmbedding(
        {
            name: tde.FeatureConfig(name, configs[feature.table])
            for name, feature in features.items()
        },
        **settings,
    )


def own_optimizers() -> dict[str, Any]:
    """Adam tells step counts apart, Adagrad sums of squares."""
    return {
        "item": keras.optimizers.Adam(0.05),
        "user": keras.optimizers.Adagrad(0.1),
    }


def make_head() -> keras.layers.Dense:
    """The rest of the model, the same in every run."""
    head = keras.layers.Dense(
        1, kernel_initializer=keras.initializers.RandomUniform(seed=5)
    )
    head.build((None, 18))  # features of width 4, 4, 3, 4 and 3
    return head


def loss_of(
    outputs: Mapping[str, tf.Tensor], head: Any, labels: tf.Tensor
) -> tf.Tensor:
    """Squared error over the batch; a replica's part adds up to the whole."""
    joined = tf.concat(
        [tf.cast(outputs[name], tf.float32) for name in sorted(outputs)], 1
    )
    missing = head.kernel.shape[0] - joined.shape[1]
    joined = tf.pad(joined, [[0, 0], [0, missing]])
    return tf.reduce_sum(tf.square(head(joined) - labels)) / BATCH


def make_step(
    layer: tde.DistributedEmbedding,
    head: Any,
    optimizer: Any,
    training: bool = True,
) -> Callable[..., tf.Tensor]:
    """A step that takes the gradient once and applies it once."""
    variables = layer.trainable_variables + head.trainable_variables
    optimizer.build(variables)

    def step(ids: Any, weights: Any, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            outputs = layer(ids, weights, training=training)
            loss = loss_of(outputs, head, labels)
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, variables), variables)
        return loss

    return step


def train(
    layer: tde.DistributedEmbedding,
    features: Mapping[str, Feature] = DENSE_FEATURES,
    *,
    optimizer: Any = None,
    wrap: Callable = tf.function,
    steps: Sequence[int] = range(STEPS),
    training: bool = True,
    kinds: Mapping[str, Callable] | None = None,
) -> keras.layers.Dense:
    """Trains the layer on the standard problem; returns the head."""
    head = make_head()
    optimizer = keras.optimizers.SGD(0.1) if optimizer is None else optimizer
    step = wrap(make_step(layer, head, optimizer, training))
    for number in steps:
        step(*batch_of(features, number, kinds=kinds))
    return head


def model_of(layer: tde.DistributedEmbedding) -> keras.Model:
    """A functional model over the dense features."""
    widths = {
        name: len(feature.steps[0][0])
        for name, feature in DENSE_FEATURES.items()
    }
    inputs = {
        name: keras.Input((width,), dtype="int64", name=name)
        for name, width in widths.items()
    }
    outputs = layer(inputs)
    joined = keras.layers.concatenate(
        [outputs[name] for name in sorted(outputs)]
    )
    return keras.Model(inputs, keras.layers.Dense(1)(joined))


def dense_dataset() -> tf.data.Dataset:
    """The batches of the dense features, in order."""
    ids = {
        name: np.concatenate([np.asarray(step) for step in feature.steps])
        for name, feature in DENSE_FEATURES.items()
    }
    labels = np.concatenate(LABELS)
    found = tf.data.Dataset.from_tensor_slices((ids, labels))
    return found.batch(BATCH)


def gains(
    table: Table,
    ids: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]] | None,
) -> np.ndarray:
    """`[B, V]`: the factor of each row of the table in each output."""
    found = np.zeros([len(ids), table.rows], np.float32)
    for row, bag in enumerate(ids):
        own = np.ones(len(bag)) if weights is None else np.array(weights[row])
        if table.combiner == "mean" and own.sum():
            own = own / own.sum()
        elif table.combiner == "mean":
            own = np.zeros(len(bag))
        np.add.at(found[row], np.asarray(bag, np.int64), own)
    return found


class DenseReference:
    """The standard problem with dense tables.

    Args:
        features: What it is fed.
        optimizers: table -> the Keras optimizer of that table, whose
            untouched rows stay, or None: trained by the model's optimizer
            as any weight is.
        optimizer: The model's optimizer.
    """

    def __init__(
        self,
        features: Mapping[str, Feature],
        optimizers: Mapping[str, Any],
        optimizer: Any = None,
    ) -> None:
        self.features = features
        self.optimizers = optimizers
        self.optimizer = optimizer or keras.optimizers.SGD(0.1)
        self.head = make_head()
        self.tables = {
            name: keras.Variable(table.values, name=name)
            for name, table in TABLES.items()
        }

    def run(self, steps: Sequence[int] = range(STEPS)) -> DenseReference:
        """Takes the steps of these batches."""
        for number in steps:
            self.step(number)
        return self

    def step(self, number: int) -> None:
        """Takes one step on a batch."""
        _, _, labels = batch_of(self.features, number)
        with tf.GradientTape() as tape:
            outputs = {}
            for name, one in self.features.items():
                weights = None if one.weights is None else one.weights[number]
                matrix = gains(TABLES[one.table], one.steps[number], weights)
                outputs[name] = tf.matmul(matrix, self.tables[one.table].value)
            loss = loss_of(outputs, self.head, labels)
        tables = list(self.tables.values())
        rest = self.head.trainable_variables
        gradients = tape.gradient(loss, tables + rest)
        with_head = []
        for name, gradient in zip(self.tables, gradients, strict=False):
            if self.optimizers[name] is None:
                with_head.append((gradient, self.tables[name]))
            else:
                self._lazily(name, gradient, number)
        with_head += zip(gradients[len(tables) :], rest, strict=True)
        self.optimizer.apply_gradients(with_head)

    def _lazily(self, name: str, gradient: Any, number: int) -> None:
        variable, optimizer = self.tables[name], self.optimizers[name]
        if not optimizer.built:
            optimizer.build([variable])
        rows = np.ones([TABLES[name].rows, 1], bool)
        for one in self.features.values():
            if one.table == name:
                rows[[i for bag in one.steps[number] for i in bag]] = False
        untouched = rows
        kept = [variable, *self.slots(name).values()]
        before = [part.numpy() for part in kept]
        optimizer.apply([gradient], [variable])
        for part, old in zip(kept, before, strict=True):
            part.assign(np.where(untouched, old, part.numpy()))

    def slots(self, name: str) -> dict[str, keras.Variable]:
        """Slot name -> the slot that Keras made for a table."""
        optimizer = self.optimizers[name]
        return {
            part.name.removeprefix(f"{name}_"): part
            for part in optimizer.variables
            if tuple(part.shape) == tuple(self.tables[name].shape)
        }

    @property
    def state(self) -> State:
        """As `state_of` a layer."""
        found: State = {}
        for name, variable in self.tables.items():
            found[name] = {"values": variable.numpy()}
            if self.optimizers[name] is None:
                continue
            for slot, part in self.slots(name).items():
                found[name][slot] = part.numpy()
            step = self.optimizers[name].iterations.numpy()
            found[name]["step"] = np.asarray(step)
        return found


def state_of(layer: tde.DistributedEmbedding) -> State:
    """Table -> {"values", each slot, "step"}."""
    found = {
        name: {"values": values.numpy()}
        for name, values in layer.get_embedding_tables().items()
    }
    for name, slots in layer.get_optimizer_state().items():
        found[name] |= {slot: np.asarray(v) for slot, v in slots.items()}
    return found


def assert_close(
    actual: State, expected: State, atol: float = 2e-6, rtol: float = 1e-5
) -> None:
    """Raises unless two states agree, naming the table and slot."""
    assert {k: set(v) for k, v in actual.items()} == {
        k: set(v) for k, v in expected.items()
    }
    for table, slots in expected.items():
        for slot, value in slots.items():
            np.testing.assert_allclose(
                np.asarray(actual[table][slot], np.float64),
                np.asarray(value, np.float64),
                rtol=rtol,
                atol=atol,
                err_msg=f"{table}:{slot}",
            )


def assert_same(actual: State, expected: State) -> None:
    """Raises unless two states are equal to the bit."""
    assert_close(actual, expected, atol=0, rtol=0)


@contextlib.contextmanager
def raises_and_keeps(
    layer: tde.DistributedEmbedding, error: Any, match: str
) -> Iterator[None]:
    """The block raises, and no table, slot or step count has changed."""
    before = state_of(layer)
    with pytest.raises(error, match=match):
        yield
    assert_same(state_of(layer), before)
