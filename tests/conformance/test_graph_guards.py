"""What a training step may not do to a table, seen in its graph.

Cost follows the ids: no operation of a step, before and after TensorFlow's
graph optimizer, makes a tensor with as many rows as a table or one of its
slots has. The tables' sizes are numbers that nothing else has. And one trace
serves batches of any length.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde

SIZES = {"sgd": 1009, "adagrad": 1013, "adam": 1019, "ftrl": 1021}
DIM = 4
BATCH = 5


def make_layer() -> tde.DistributedEmbedding:
    """Ragged, sparse, dense and per-position features on each optimizer."""
    features = {}
    for optimizer, size in SIZES.items():
        table = tde.TableConfig(
            optimizer, size, DIM, optimizer=optimizer, combiner="mean"
        )
        for kind in ("ragged", "sparse", "dense", "unreduced"):
            name = f"{optimizer}_{kind}"
            shape = (None, 3, DIM) if kind == "unreduced" else None
            features[name] = tde.FeatureConfig(name, table, output_shape=shape)
    return tde.DistributedEmbedding(features, invalid_ids="drop")


SPECS = {
    "ragged": tf.RaggedTensorSpec([None, None], tf.int64),
    "sparse": tf.SparseTensorSpec([None, None], tf.int64),
    "dense": tf.TensorSpec([None, 2], tf.int64),
    "unreduced": tf.RaggedTensorSpec([None, None], tf.int64),
}
WEIGHTS_SPEC = tf.RaggedTensorSpec([None, None], tf.float32)


def inputs_of(layer_inputs: Iterable[str]) -> dict[str, object]:
    rows = tf.ragged.constant(
        [[3, 3, 1], [], [5], [1004, 1005], []], dtype=tf.int64
    )
    values = {
        "ragged": rows,
        "sparse": rows.to_sparse(),
        "dense": tf.constant([[3, 1]] * BATCH, tf.int64),
        "unreduced": rows,
    }
    return {name: values[name.rsplit("_", 1)[1]] for name in layer_inputs}


def training_step(layer, optimizer, extra_loss=lambda: 0.0):
    names = [f"{o}_{kind}" for o in SIZES for kind in SPECS]

    def step(inputs, weights):
        weighted = {
            name: weights if name.endswith("ragged") else None for name in names
        }
        with tf.GradientTape() as tape:
            outputs = layer(inputs, weighted, training=True)
            loss = tf.add_n([tf.reduce_sum(x**2) for x in outputs.values()])
            loss += extra_loss()
        variables = layer.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    signature = [
        {name: SPECS[name.rsplit("_", 1)[1]] for name in names},
        WEIGHTS_SPEC,
    ]
    return tf.function(step, input_signature=signature), names


def weights_of_inputs() -> tf.RaggedTensor:
    return tf.ragged.constant(
        [[1.0, 2.0, 0.5], [], [1.0], [1.0, -2.0], []], dtype=tf.float32
    )


# -- What the graphs make ----------------------------------------------------


def table_sized(shape: tf.TensorShape) -> bool:
    return shape.rank is not None and any(
        size in SIZES.values() for size in shape.as_list()
    )


def offences(graph_def: tf.compat.v1.GraphDef) -> list[str]:
    """Operations of a graph, and of its functions, that touch whole tables.

    That is, those with an output that has as many rows as a table, and reads
    of a variable whose shape cannot be told.
    """
    found = []
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
    for operation in graph.get_operations():
        for output in operation.outputs:
            found += _offence(operation.type, operation.name, output.shape)
    for function in graph_def.library.function:
        for node in function.node_def:
            shapes = node.attr["_output_shapes"].list.shape
            where = f"{function.signature.name}/{node.name}"
            if not shapes and node.op == "ReadVariableOp":
                found.append(f"{node.op} {where}: of unknown shape")
            for shape in shapes:
                found += _offence(node.op, where, tf.TensorShape(shape))
    return found


def _offence(kind: str, name: str, shape: tf.TensorShape) -> Iterator[str]:
    if table_sized(shape):
        yield f"{kind} {name}: makes {shape}"
    elif kind == "ReadVariableOp" and not shape.is_fully_defined():
        yield f"{kind} {name}: of unknown shape"


def optimized_graphs(
    function, arguments, directory: pathlib.Path
) -> list[tf.compat.v1.GraphDef]:
    """The graphs of a step that TensorFlow runs, after optimizing them."""
    writer = tf.summary.create_file_writer(str(directory))
    tf.summary.trace_on(graph=True)
    function(*arguments)
    with writer.as_default():
        tf.summary.trace_export("step", step=0)
    writer.close()
    graphs = []
    for path in directory.iterdir():
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                data = tf.compat.v1.RunMetadata.FromString(
                    value.tensor.string_val[0]
                )
                graphs += [
                    g.post_optimization_graph for g in data.function_graphs
                ]
    # Not those of single operations that run before it.
    return [g for g in graphs if "ResourceScatterUpdate" in operation_types(g)]


def operation_types(graph_def: tf.compat.v1.GraphDef) -> set[str]:
    nodes = [*graph_def.node]
    for function in graph_def.library.function:
        nodes += function.node_def
    return {node.op for node in nodes}


@pytest.fixture(scope="module")
def step_of_all_kinds():
    layer = make_layer()
    function, names = training_step(layer, keras.optimizers.SGD(1.0))
    return layer, function, (inputs_of(names), weights_of_inputs())


def test_no_operation_of_a_traced_step_makes_a_whole_table(step_of_all_kinds):
    _, function, _ = step_of_all_kinds
    graph = function.get_concrete_function().graph.as_graph_def(add_shapes=True)
    assert {"ResourceGather", "ResourceScatterUpdate"} <= operation_types(graph)
    assert not offences(graph)


def test_no_operation_of_the_optimized_step_makes_a_whole_table(
    step_of_all_kinds, tmp_path
):
    layer, function, arguments = step_of_all_kinds
    before = layer.get_embedding_tables()
    graphs = optimized_graphs(function, arguments, tmp_path)
    after = layer.get_embedding_tables()
    for name in SIZES:
        assert not np.array_equal(before[name], after[name])
    assert graphs
    assert not [offence for g in graphs for offence in offences(g)]


def test_the_guard_sees_a_table_that_is_read(tmp_path):
    layer = make_layer()
    whole = layer.trainable_variables[0]
    function, names = training_step(
        layer,
        keras.optimizers.SGD(1.0),
        lambda: tf.reduce_sum(tf.stop_gradient(whole.value)),
    )
    graph = function.get_concrete_function().graph.as_graph_def(add_shapes=True)
    assert any("ReadVariableOp" in line for line in offences(graph))
    graphs = optimized_graphs(
        function, (inputs_of(names), weights_of_inputs()), tmp_path
    )
    assert any("ReadVariableOp" in line for g in graphs for line in offences(g))


# -- How often a step is traced ----------------------------------------------


def varying_batches(count: int) -> Iterator[tf.RaggedTensor]:
    draw = np.random.default_rng(3)
    for _ in range(count):
        lengths = draw.integers(0, 9, size=draw.integers(1, 12))
        yield tf.RaggedTensor.from_row_lengths(
            draw.integers(0, 50, lengths.sum()), lengths
        )


def test_one_trace_serves_ragged_batches_of_any_length():
    layer = tde.DistributedEmbedding(
        tde.FeatureConfig("f", tde.TableConfig("t", 50, DIM))
    )
    optimizer = keras.optimizers.SGD(1.0)
    traces = []

    @tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.int64)])
    def step(ids):
        traces.append(ids)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids, training=True) ** 2)
        variables = layer.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    optimizer.build(layer.trainable_variables)
    for batch in varying_batches(50):
        step(batch)
    assert len(traces) == 1
    assert layer.get_optimizer_state()["t"]["step"] == 50


class CountsCalls(keras.layers.Layer):
    """Counts how often Python runs it, which is when a graph is made."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, inputs):
        self.calls += 1
        return inputs


def test_fit_traces_once_for_ragged_batches_of_any_length():
    ids = keras.Input((None,), dtype="int64", ragged=True)
    layer = tde.DistributedEmbedding(
        tde.FeatureConfig("f", tde.TableConfig("t", 50, DIM))
    )
    counter = CountsCalls()
    model = keras.Model(ids, keras.layers.Dense(1)(counter(layer(ids))))
    model.compile("sgd", "mse")

    def examples():
        for batch in varying_batches(50):
            yield batch, tf.zeros([batch.nrows(), 1])

    dataset = tf.data.Dataset.from_generator(
        examples,
        output_signature=(
            tf.RaggedTensorSpec([None, None], tf.int64),
            tf.TensorSpec([None, 1], tf.float32),
        ),
    )
    before = counter.calls
    model.fit(dataset.take(1), verbose=0)
    in_one_trace = counter.calls - before
    model.fit(dataset, verbose=0)
    assert counter.calls == before + in_one_trace
    assert in_one_trace <= 2
    assert layer.get_optimizer_state()["t"]["step"] == 51
