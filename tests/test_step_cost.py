"""What a training step costs: rows, never a whole table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests import dense_reference as ref

K = keras.optimizers


def _operations_on(function: Any, handles: dict[int, str]) -> dict[str, set]:
    """Name of a variable -> types of the operations that a graph has on it."""
    found: dict[str, set] = {name: set() for name in handles.values()}

    def walk(graph: tf.Graph, names: dict[int, str]) -> None:
        inside = dict(names)
        for outer, inner in getattr(graph, "captures", []):
            if id(outer) in names:
                inside[id(inner)] = names[id(outer)]
        for op in graph.get_operations():
            called = [
                op.get_attr(key).name
                for key in ("f", "then_branch", "else_branch", "body", "cond")
                if key in op.node_def.attr
            ]
            for value in op.inputs:
                if id(value) in inside and not called:
                    found[inside[id(value)]].add(op.type)
            for name in called:
                own = graph._get_function(name).graph
                given = list(op.inputs)
                if "then_branch" in op.node_def.attr:
                    given = given[1:]
                walk(
                    own,
                    {
                        id(inner): inside[id(outer)]
                        for inner, outer in zip(own.inputs, given, strict=True)
                        if id(outer) in inside
                    },
                )

    walk(function.graph, handles)
    return found


COSTS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: K.AdamW(0.1, weight_decay=0.1),
    "global_clipnorm": lambda: K.SGD(0.1, global_clipnorm=1.0),
    "loss_scale_factor": lambda: K.SGD(0.1, loss_scale_factor=8.0),
    "loss_scale": lambda: K.LossScaleOptimizer(K.SGD(0.1)),
}


@pytest.mark.parametrize("name", COSTS)
def test_a_step_reads_and_writes_rows_never_a_whole_table(name: str) -> None:
    layer, head = ref.make_layer(optimizers="adam"), ref.make_head()
    step = tf.function(ref.make_step(layer, head, COSTS[name]()))
    function = step.get_concrete_function(*ref.batch_of(ref.DENSE_FEATURES, 0))
    parts, counts = {}, {}
    for table in layer.trainable_variables:
        optimizer = table.row_optimizer
        for variable in [table, *optimizer.slots.values()]:
            parts[id(variable.value.handle)] = f"{table.path}:{variable.name}"
        counts[id(optimizer.iterations.value.handle)] = f"{table.path}:step"
    assert len(parts) == 6
    for found in _operations_on(function, parts).values():
        assert {"ResourceGather", "ResourceScatterUpdate"} <= found
        # Neither of the others looks at the values.
        assert found <= {
            "ResourceGather",
            "ResourceScatterUpdate",
            "VariableShape",
            "NoOp",
        }
    for found in _operations_on(function, counts).values():
        # One operation, so that no count is lost between reading and writing.
        assert "AssignAddVariableOp" in found
        assert "AssignVariableOp" not in found


def test_a_mixed_policy_reads_rows_only() -> None:
    """Autocasting would read the whole table to cast it."""
    layer = ref.make_layer(optimizers="adam", dtype="mixed_bfloat16")
    step = tf.function(ref.make_step(layer, ref.make_head(), K.SGD()))
    function = step.get_concrete_function(*ref.batch_of(ref.DENSE_FEATURES, 0))
    handles = {
        id(table.value.handle): table.path
        for table in layer.trainable_variables
    }
    assert len(handles) == 2
    for found in _operations_on(function, handles).values():
        assert "ReadVariableOp" not in found
        assert {"ResourceGather", "ResourceScatterUpdate"} <= found


def _shapes(graph: Any) -> list[tuple[int | None, ...]]:
    """Static shapes of all tensors, also in branches and inner functions."""
    definition = graph.as_graph_def(add_shapes=True)
    nodes = [*definition.node]
    for function in definition.library.function:
        nodes += function.node_def
    return [
        tuple(size.size for size in shape.dim)
        for node in nodes
        for shape in node.attr["_output_shapes"].list.shape
    ]


@pytest.mark.parametrize(
    "name", ["adamw", "global_clipnorm", "loss_scale_factor"]
)
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_no_tensor_of_a_step_has_the_shape_of_a_table(
    name: str, dtype: str
) -> None:
    """Of loss scales the fixed one; Keras' dynamic one makes dense gradients
    to check whether they are finite.
    """
    layer = ref.make_layer(optimizers="adam", dtype=dtype)
    step = tf.function(ref.make_step(layer, ref.make_head(), COSTS[name]()))
    function = step.get_concrete_function(*ref.batch_of(ref.DENSE_FEATURES, 0))
    shapes = _shapes(function.graph)
    assert (ref.BATCH, 4) in shapes  # outputs of the layer are among them
    assert (11, 4) not in shapes
    assert (6, 3) not in shapes


def test_a_checkpoint_holds_each_table_and_slot_once(tmp_path: Any) -> None:
    layer = ref.make_layer(optimizers="adam")
    ref.train(layer, steps=[0])
    path = tf.train.Checkpoint(layer=layer).write(str(tmp_path / "ckpt"))
    shapes = [tuple(shape) for _, shape in tf.train.list_variables(path)]
    assert shapes.count((11, 4)) == 3
    assert shapes.count((6, 3)) == 3
