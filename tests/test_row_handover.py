"""What a step looks for and reads once: distinct ids, and their rows.

The update uses the rows that the lookup has read. Where the table may have
changed in between, or where the ids of several lookups meet, it reads anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tf_distembed.backends import compilation

ROWS, DIM = 7, 2
IDS = tf.constant([[1, 3], [3, 5], [1, 1]], tf.int64)


class Setup:
    """A layer, and what trains it.

    Two features a table, dense and ragged; each table holds its row ids.
    """

    def __init__(self, optimizers: dict[str, Any]) -> None:
        features = {}
        for name, optimizer in optimizers.items():
            table = tde.TableConfig(
                name, ROWS, DIM, optimizer=optimizer, combiner="sum"
            )
            for kind in ("dense", "ragged"):
                feature = f"{name}_{kind}"
                features[feature] = tde.FeatureConfig(feature, table)
        self.layer = tde.DistributedEmbedding(features)
        rows = np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], DIM, 1)
        self.layer.set_embedding_tables(dict.fromkeys(optimizers, rows))
        self.variables = self.layer.trainable_variables
        self.optimizer = keras.optimizers.SGD(1.0)
        self.optimizer.build(self.variables)

    def outputs(self, ids: tf.Tensor, *, training: bool) -> list[tf.Tensor]:
        inputs = {
            f"{name}_{kind}": (
                ids if kind == "dense" else tf.RaggedTensor.from_tensor(ids)
            )
            for name in self.layer.table_optimizers
            for kind in ("dense", "ragged")
        }
        return list(self.layer(inputs, training=training).values())

    def loss(self, ids: tf.Tensor) -> tf.Tensor:
        outputs = self.outputs(ids, training=True)
        return tf.add_n([tf.reduce_sum(one) for one in outputs])

    def gradients(self, ids: tf.Tensor) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = self.loss(ids)
        return tape.gradient(loss, self.variables)

    def apply(self, gradients: list[Any]) -> None:
        self.optimizer.apply(gradients, self.variables)

    def step(self, ids: tf.Tensor) -> None:
        self.apply(self.gradients(ids))

    def first_column(self) -> np.ndarray:
        return self.layer.get_embedding_tables()["t"].numpy()[:, 0]


def operations(function: Any, *args: Any) -> Counter[str]:
    """How often each type occurs in a traced function, branches included."""
    definition = function.get_concrete_function(*args).graph.as_graph_def()
    nodes = [*definition.node]
    for inner in definition.library.function:
        nodes += inner.node_def
    return Counter(node.op for node in nodes)


# -- How often ---------------------------------------------------------------


@pytest.mark.parametrize(("has_gpu", "searches"), [(False, 3), (True, 2)])
def test_a_step_finds_distinct_ids_once_and_reads_rows_once(
    has_gpu: bool, searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs once a table, which run in parallel; on a GPU once a stack."""
    monkeypatch.setattr(compilation, "has_gpu", lambda: has_gpu)
    # Two stacks: of the equal ones, and of the other. Adagrad has one slot.
    setup = Setup({"a": "adagrad", "b": "adagrad", "c": "sgd"})
    counts = operations(tf.function(setup.step), IDS)
    assert counts["Unique"] == searches
    assert counts["ResourceGather"] == 3 + 2
    assert counts["ResourceScatterUpdate"] == 3 + 2


def test_a_step_of_keras_finds_distinct_ids_once() -> None:
    ids = {name: keras.Input((2,), dtype="int64") for name in ("t_dense", "u")}
    tables = [
        tde.TableConfig(name, ROWS, DIM, optimizer="adagrad") for name in "tu"
    ]
    layer = tde.DistributedEmbedding(
        {
            name: tde.FeatureConfig(name, table)
            for name, table in zip(ids, tables, strict=True)
        }
    )
    outputs = keras.layers.Concatenate()(list(layer(ids).values()))
    model = keras.Model(ids, keras.layers.Dense(1)(outputs))
    model.compile("adam", "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    batch = (dict.fromkeys(ids, IDS), tf.zeros([3, 1]))
    model.train_on_batch(*batch)
    counts = operations(tf.function(model.train_step), batch)
    assert counts["Unique"] == 2
    assert counts["ResourceGather"] == 2 + 2


def test_inference_looks_for_no_distinct_ids() -> None:
    setup = Setup({"t": "adagrad"})
    lookup = tf.function(lambda ids: setup.outputs(ids, training=False))
    assert operations(lookup, IDS)["Unique"] == 0


# -- When rows are read anew --------------------------------------------------


def written(setup: Setup) -> tf.Operation:
    """Sets row 3 of the table to 100."""
    table = setup.variables[0].value
    return table.scatter_update(
        tf.IndexedSlices(tf.fill([1, DIM], 100.0), tf.constant([3]))
    )


def written_by_a_function(setup: Setup) -> None:
    tf.function(lambda: written(setup))()


def written_in_a_branch(setup: Setup) -> None:
    def write() -> tf.Tensor:
        written(setup)
        return tf.constant(0)

    tf.cond(tf.random.uniform([]) < 2.0, write, lambda: tf.constant(1))


def written_in_a_loop(setup: Setup) -> None:
    def body(i: tf.Tensor) -> tf.Tensor:
        written(setup)
        return i + 1

    tf.while_loop(lambda i: i < 2, body, [tf.constant(0)])


@pytest.mark.parametrize(
    "write",
    [written, written_by_a_function, written_in_a_branch, written_in_a_loop],
)
def test_a_write_between_lookup_and_update_is_not_undone(
    write: Callable[[Any], Any],
) -> None:
    setup = Setup({"t": keras.optimizers.SGD(1.0)})

    @tf.function
    def step(ids: tf.Tensor) -> None:
        gradients = setup.gradients(ids)
        write(setup)
        setup.apply(gradients)

    step(IDS)
    # Two features; row 1 comes 3 times in each, row 3 twice, row 5 once.
    np.testing.assert_array_equal(setup.first_column(), [0, -5, 2, 96, 4, 3, 6])


def test_two_steps_in_one_function_are_two_steps() -> None:
    together, apart = Setup({"t": "adagrad"}), Setup({"t": "adagrad"})
    other = tf.constant([[3, 3], [6, 1]], tf.int64)

    @tf.function
    def both() -> None:
        for ids in (IDS, other):
            together.step(ids)

    both()
    one = tf.function(apart.step)
    one(IDS)
    one(other)
    np.testing.assert_array_equal(together.first_column(), apart.first_column())
    ours, theirs = (
        setup.layer.get_optimizer_state()["t"]["accumulator"]
        for setup in (together, apart)
    )
    np.testing.assert_array_equal(ours, theirs)


def test_gradients_taken_before_either_is_applied_both_count() -> None:
    setup = Setup({"t": keras.optimizers.SGD(1.0)})

    @tf.function
    def step(ids: tf.Tensor) -> None:
        first = setup.gradients(ids)
        second = setup.gradients(ids)
        setup.apply(first)
        setup.apply(second)

    step(IDS)
    np.testing.assert_array_equal(
        setup.first_column(), [0, -11, 2, -5, 4, 1, 6]
    )


def test_ids_of_two_calls_in_one_step_are_summed() -> None:
    setup = Setup({"t": keras.optimizers.SGD(1.0)})
    other = tf.constant([[3, 0], [3, 0], [3, 0]], tf.int64)

    @tf.function
    def step(ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = setup.loss(ids) + setup.loss(other)
        setup.apply(tape.gradient(loss, setup.variables))

    step(IDS)
    np.testing.assert_array_equal(
        setup.first_column(), [-6, -5, 2, -7, 4, 3, 6]
    )


def test_a_gradient_put_together_by_hand_is_taken_as_it_is() -> None:
    """Its ids repeat, though they were made from a lookup's."""
    setup = Setup({"t": keras.optimizers.SGD(1.0)})

    @tf.function
    def step(ids: tf.Tensor) -> None:
        (gradient,) = setup.gradients(ids)
        twice = tf.IndexedSlices(
            tf.concat([gradient.values, gradient.values], 0),
            tf.concat([gradient.indices, gradient.indices], 0),
            gradient.dense_shape,
        )
        setup.apply([twice])

    step(IDS)
    np.testing.assert_array_equal(
        setup.first_column(), [0, -11, 2, -5, 4, 1, 6]
    )
