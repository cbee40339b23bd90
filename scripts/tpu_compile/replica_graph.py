"""A replica's trace, cut where it leaves the chip for the host.

`strategy.run` under TPUStrategy leaves one replica in the graph, each of its
operations marked: those of the host blocks, and the others, which a TPU
compiles. `Replica` finds it, wherever it stands in the graph of a function,
and builds either half again in another graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_distembed.testing.private_tensorflow import (
    add_function,
    function_graph,
    functions_of,
)
from tf_distembed.testing.replica_program import (
    HOST_MARK,
    INPUT_MARK,
    OUTPUT_MARK,
    REPLICA_MARK,
    called_functions,
    has_mark,
    on_host,
)

# Through these what the host sorted goes to the chip, unchanged but for the
# mark of how much of each buffer is in use.
_HAND_OVER = frozenset(
    {"TPUCopyWithDynamicShape", "TPUAnnotateTensorsWithDynamicShape"}
)
# What `tpu.replicate` puts around a replica.
_FRAME = frozenset({"TPUReplicateMetadata", "TPUCompilationResult"})
_WRITES = frozenset(
    {
        "AssignAddVariableOp",
        "AssignSubVariableOp",
        "AssignVariableOp",
        "ResourceScatterUpdate",
    }
)
_DROPPED_ATTRIBUTES = frozenset(
    {
        REPLICA_MARK,
        HOST_MARK,
        INPUT_MARK,
        OUTPUT_MARK,
        "_xla_map_outside_compilation",
        "_embedding_pipelining",
        "_class",
    }
)


@dataclasses.dataclass
class Replica:
    """One replica, as `tpu.replicate` left it in a graph.

    Attributes:
        graph: The graph in which it stands.
        loops: Loops of the host around it.
        variables: Name of a handle -> the variable's copy on the first chip.
    """

    graph: Any
    loops: int
    variables: dict[str, tf.Variable]

    @classmethod
    def find(cls, graph: Any, variables: dict[str, tf.Variable]) -> Replica:
        """The only replica in a graph and in what it calls.

        Raises:
            ValueError: there is none, or there are several.
        """
        found = list(_graphs_with_replica(graph, 0))
        if len(found) != 1:
            raise ValueError(f"{len(found)} replicas instead of one.")
        return cls(*found[0], variables)

    def inputs(self) -> list[tf.Tensor]:
        """What `strategy.run` was given, in order, the replica's id first."""
        return [
            operation.outputs[0]
            for operation in self.graph.get_operations()
            if operation.type == "TPUReplicatedInput"
            and operation.outputs[0].name not in self.variables
        ]

    def device_operations(self) -> list[tf.Operation]:
        """What a TPU compiles: all that has an effect, and what it needs."""
        marked = [
            operation
            for operation in self.graph.get_operations()
            if has_mark(operation, REPLICA_MARK)
            and not on_host(operation)
            and operation.type not in _FRAME
        ]
        needed = {o.name for o in marked if o.op_def.is_stateful}
        for operation in reversed(marked):
            if operation.name in needed:
                needed.update(t.op.name for t in operation.inputs)
                needed.update(o.name for o in operation.control_inputs)
        return [o for o in marked if o.name in needed]

    def from_host(self) -> list[tf.Tensor]:
        """What the chip takes from the host blocks."""
        found: dict[str, tf.Tensor] = {}
        for operation in self.device_operations():
            for tensor in operation.inputs:
                if on_host(tensor.op):
                    found[tensor.name] = tensor
        return list(found.values())

    def changed_variables(self) -> set[str]:
        """Names of the handles of variables that a TPU writes."""
        return {
            operation.inputs[0].name
            for operation in self.device_operations()
            if operation.type in _WRITES
        }

    def run_host_blocks(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What the host makes for `from_host` of one replica's inputs.

        Args:
            values: For each of `inputs`.
        """
        wanted = [_handed_over(tensor) for tensor in self.from_host()]
        names = [tensor.name for tensor in self.inputs()]
        needed: dict[str, tf.Operation] = {}
        stack = [tensor.op for tensor in wanted]
        while stack:
            operation = stack.pop()
            if operation.name not in needed:
                needed[operation.name] = operation
                stack += [t.op for t in operation.inputs]
        order = [o for o in self.graph.get_operations() if o.name in needed]

        def host(*values: tf.Tensor) -> list[tf.Tensor]:
            known = dict(zip(names, values, strict=True))
            _copy_all(order, known, self.graph)
            return [known[tensor.name] for tensor in wanted]

        return tf.function(host).get_concrete_function(*values)(*values)

    def build_device_half(
        self,
        inputs: Sequence[tf.Tensor],
        from_host: Sequence[tf.Tensor],
        state: Mapping[str, tf.Tensor],
    ) -> dict[str, tf.Tensor]:
        """Builds what a TPU compiles into the graph being traced.

        Variables become values that go in and come out: TensorFlow lowers
        no function with variables where there is no device to hold them.

        Args:
            inputs: For each of `inputs`.
            from_host: For each of `from_host`.
            state: Name of a variable's handle -> its value before.

        Returns:
            Name of a variable's handle -> its value after.
        """
        state = dict(state)
        known: dict[str, tf.Tensor] = {}
        for tensors, values in (
            (self.inputs(), inputs),
            (self.from_host(), from_host),
        ):
            for tensor, value in zip(tensors, values, strict=True):
                known[tensor.name] = value
        _copy_all(self.device_operations(), known, self.graph, state)
        return state


def _touches_variable(
    operation: tf.Operation, state: Mapping[str, tf.Tensor]
) -> bool:
    return any(tensor.name in state for tensor in operation.inputs)


def _on_value(
    operation: tf.Operation,
    known: dict[str, tf.Tensor],
    state: dict[str, tf.Tensor],
) -> tf.Tensor | None:
    """Does to a variable's value what an operation does to the variable.

    Returns:
        What the operation returns, if anything.
    """
    kind = operation.type
    handle, *others = (tensor.name for tensor in operation.inputs)
    given = [known[name] for name in others]
    value = state[handle]
    if kind == "ReadVariableOp":
        return tf.identity(value)
    if kind == "AssignVariableOp":
        (value,) = given
    elif kind == "AssignAddVariableOp":
        value = value + given[0]
    elif kind == "AssignSubVariableOp":
        value = value - given[0]
    elif kind == "ResourceScatterUpdate":
        ids, rows = given
        value = tf.tensor_scatter_nd_update(value, ids[:, tf.newaxis], rows)
    else:
        raise NotImplementedError(
            f"{kind} {operation.name!r} takes a variable; say in "
            f"{__name__} what it does to the variable's value."
        )
    state[handle] = value
    return None


def _graphs_with_replica(graph: Any, loops: int) -> Iterable[tuple[Any, int]]:
    operations = graph.get_operations()
    if any(o.type == "TPUReplicateMetadata" for o in operations):
        yield graph, loops
    for operation in operations:
        inside = loops + (operation.type in ("While", "StatelessWhile"))
        for name in called_functions(operation):
            yield from _graphs_with_replica(function_graph(name, graph), inside)


def _handed_over(tensor: tf.Tensor) -> tf.Tensor:
    """What the host computed, before it was handed over to the chip."""
    while tensor.op.type in _HAND_OVER:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _copy_all(
    operations: Iterable[tf.Operation],
    known: dict[str, tf.Tensor],
    source: Any,
    state: dict[str, tf.Tensor] | None = None,
) -> None:
    """Makes operations again.

    Args:
        operations: In an order in which they can be made.
        known: Old name of a tensor -> the new tensor.
        source: Their graph.
        state: Name of a variable's handle -> its value now.
    """
    target = tf.compat.v1.get_default_graph()
    for function in functions_of(source):
        add_function(target, function)
    made: dict[str, tf.Operation] = {}
    for operation in operations:
        if operation.outputs and operation.outputs[0].name in known:
            continue
        for tensor in operation.inputs:
            if tensor.name not in known and tensor.op.type == "Const":
                known[tensor.name] = tf.constant(tf.get_static_value(tensor))
        if state is not None and _touches_variable(operation, state):
            on_value = _on_value(operation, known, state)
            if on_value is not None:
                known[operation.outputs[0].name] = on_value
            continue
        controls = [
            made[o.name] for o in operation.control_inputs if o.name in made
        ]
        with tf.control_dependencies(controls):
            copy = target.create_op(
                operation.type,
                [known[tensor.name] for tensor in operation.inputs],
                [tensor.dtype for tensor in operation.outputs],
                name=operation.name,
                attrs={
                    key: value
                    for key, value in operation.node_def.attr.items()
                    if key not in _DROPPED_ATTRIBUTES
                },
                op_def=operation.op_def,
            )
        made[operation.name] = copy
        for old, new in zip(operation.outputs, copy.outputs, strict=True):
            known[old.name] = new
