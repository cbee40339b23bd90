"""Builds one traced replica once for each chip, out of CPU operations.

`tpu.replicate` traces a replica once and marks its operations; a TPU runtime
then compiles that part and sends it to every chip. Here the same graph is
walked operation by operation, and each is made again once for each chip, on
the logical CPU that stands for it. Going through all chips one operation at a
time is what lets the chips meet: a cross-replica sum, or a SparseCore lookup
in the tables of the other chips, finds the inputs of all of them at hand.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_distembed.testing import collectives, device_ops, xla_indices
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
    ReplicaProgram,
    called_functions,
    has_mark,
    is_meeting,
    live_operations,
    on_host,
)

_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_BRANCHES = frozenset(
    {"If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile"}
)
# Attributes that mean something to a TPU runtime, or to another graph.
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


def build(
    program: ReplicaProgram,
    *,
    chips: Sequence[str],
    host: str,
    sparsecores_per_chip: int,
    guard: Callable[[], None],
) -> Any:
    """Builds a replica program for all chips into the graph being traced.

    Args:
        program: The replica's trace.
        chips: The device of each chip.
        host: The device of the host.
        sparsecores_per_chip: SparseCores of one chip.
        guard: Called before the chips do anything, at each run; what it
            raises stops the run.

    Returns:
        `program.result`, with tensors of the graph being traced.
    """
    target = tf.compat.v1.get_default_graph()
    for function in functions_of(program.graph):
        add_function(target, function)
    builder = _Builder(program, chips, host, sparsecores_per_chip)
    for outer, inner in program.graph.captures:
        builder.values[inner.name] = [outer] * len(chips)

    def check() -> bool:
        guard()
        return True

    with tf.device(host):
        checked = tf.numpy_function(check, [], tf.bool)
    with tf.control_dependencies([checked]):
        builder.add(program.live_operations(), in_replica=False)

    def result_of(tensor: Any) -> Any:
        if not isinstance(tensor, tf.Tensor):
            return tensor
        built = builder.values[tensor.name][0]
        built.set_shape(tensor.shape)
        return built

    return tf.nest.map_structure(
        result_of, program.result, expand_composites=True
    )


class _Builder:
    """Makes operations of one trace again, once for each chip.

    `values` holds, for each tensor of the trace by name, its counterpart on
    every chip; `done` the operations made for each operation, for control
    dependencies. A value that is the same on all chips is made once and
    stands there `len(chips)` times.
    """

    def __init__(
        self,
        program: ReplicaProgram,
        chips: Sequence[str],
        host: str,
        sparsecores_per_chip: int,
    ) -> None:
        self.program = program
        self.chips = chips
        self.host = host
        self.sparsecores_per_chip = sparsecores_per_chip
        self.values: dict[str, list[tf.Tensor]] = {}
        self.done: dict[str, list[tf.Operation]] = {}

    def add(self, operations: Iterable[tf.Operation], in_replica: bool) -> None:
        """Makes operations, in the given order.

        `in_replica` says that all of them belong to the replica, as those of
        a function called by it do; else their mark tells.
        """
        for operation in operations:
            if operation.outputs and operation.outputs[0].name in self.values:
                continue  # A capture or an argument, known from outside.
            if operation.type == "TPUReplicatedInput":
                self._set(operation, [self._entering(operation)])
            elif operation.type == "TPUReplicatedOutput":
                (value,) = self._inputs(operation)
                self._set(operation, [[each] * len(value) for each in value])
            elif in_replica or has_mark(operation, REPLICA_MARK):
                self._add_to_chips(operation)
            else:
                self._copy_once(operation)

    def _add_to_chips(self, operation: tf.Operation) -> None:
        kind = operation.type
        if is_meeting(kind):
            self._meet(operation)
        elif kind == "TPUCopyWithDynamicShape":
            self._set(operation, _cut(self._inputs(operation)))
        elif kind == "TPUAnnotateTensorsWithDynamicShape":
            self._set(operation, self._inputs(operation))
        elif kind == "XlaSetDynamicDimensionSize":
            self._set(operation, [_without_filling(*self._inputs(operation))])
        elif kind in _CALLS and self._meets_inside(operation):
            self._inline(operation)
        elif kind in _BRANCHES and self._meets_inside(operation):
            raise NotImplementedError(
                f"{kind} {operation.name!r} in a replica: the emulator cannot "
                "let the chips meet (all_reduce, an optimizer's update, a "
                "SparseCore lookup) in a condition or a loop that is itself "
                "inside the replica. Put the loop around strategy.run."
            )
        else:
            self._copy(operation)

    # What goes in and out of an operation.

    def _inputs(self, operation: tf.Operation) -> list[list[tf.Tensor]]:
        return [self.values[tensor.name] for tensor in operation.inputs]

    def _entering(self, operation: tf.Operation) -> list[tf.Tensor]:
        """What comes into the replica of each chip."""
        copies = self.program.variables.get(operation.outputs[0].name)
        if copies is None:
            return [value[0] for value in self._inputs(operation)]
        return [copy.handle for copy in copies]

    def _set(
        self, operation: tf.Operation, outputs: Sequence[Sequence[tf.Tensor]]
    ) -> None:
        for tensor, value in zip(operation.outputs, outputs, strict=True):
            self.values[tensor.name] = list(value)
        self.done[operation.name] = [
            tensor.op
            for value in outputs
            for tensor in value
            if tf.is_symbolic_tensor(tensor)
        ]

    def _controls(self, operation: tf.Operation) -> list[tf.Operation]:
        return [
            made
            for control in operation.control_inputs
            for made in self.done.get(control.name, ())
        ]

    # The kinds of operations.

    def _copy_once(self, operation: tf.Operation) -> None:
        inputs = [value[0] for value in self._inputs(operation)]
        controls = self._controls(operation)
        with tf.device(self.host), tf.control_dependencies(controls):
            copy = _copy(
                operation, inputs, operation.name, _attributes(operation)
            )
        self._set(operation, [[t] * len(self.chips) for t in copy.outputs])
        self.done[operation.name] = [copy]

    def _copy(self, operation: tf.Operation) -> None:
        inputs = self._inputs(operation)
        same = all(t is value[0] for value in inputs for t in value)
        if same and not operation.op_def.is_stateful:
            self._copy_once(operation)
            return
        host = self.host if on_host(operation) else None
        controls = self._controls(operation)
        attributes = _attributes(operation)
        copies = []
        for chip, device in enumerate(self.chips):
            own = [value[chip] for value in inputs]
            with tf.device(host or device), tf.control_dependencies(controls):
                name = f"chip_{chip}/{operation.name}"
                copies.append(_copy(operation, own, name, attributes))
        self._set(
            operation,
            [
                [copy.outputs[i] for copy in copies]
                for i in range(len(operation.outputs))
            ],
        )
        self.done[operation.name] = copies

    def _meet(self, operation: tf.Operation) -> None:
        inputs = self._inputs(operation)
        with (
            tf.device(self.host),
            tf.control_dependencies(self._controls(operation)),
            tf.name_scope(operation.name),
        ):
            if operation.type in collectives.TYPES:
                outputs = [collectives.collective(operation, inputs[0])]
            else:
                outputs = device_ops.sparsecore_op(
                    operation, inputs, self.sparsecores_per_chip
                )
        self._set(operation, outputs)

    def _meets_inside(self, operation: tf.Operation) -> bool:
        """Whether chips meet in a function that the operation calls."""
        seen: set[str] = set()
        calling = [operation]
        while calling:
            for name in called_functions(calling.pop()):
                if name in seen:
                    continue
                seen.add(name)
                body = function_graph(name, self.program.graph)
                for inner in body.get_operations():
                    if is_meeting(inner.type):
                        return True
                    calling.append(inner)
        return False

    def _inline(self, operation: tf.Operation) -> None:
        (name,) = called_functions(operation)
        body = function_graph(name, self.program.graph)
        inner = _Builder(
            self.program, self.chips, self.host, self.sparsecores_per_chip
        )
        for placeholder, value in zip(
            body.inputs, self._inputs(operation), strict=True
        ):
            inner.values[placeholder.name] = value
        operations = live_operations(
            body.get_operations(), [t.op for t in body.outputs]
        )
        with tf.control_dependencies(self._controls(operation)):
            inner.add(operations, in_replica=True)
        self._set(operation, [inner.values[t.name] for t in body.outputs])
        self.done[operation.name] = [
            made for each in inner.done.values() for made in each
        ]


def _cut(values: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
    """Tensors, then the size of each: the tensors cut to their sizes.

    A TPU gets buffers of a fixed size of which only a part is in use.
    """
    middle = len(values) // 2
    return [
        [tensor[:size] for tensor, size in zip(tensors, sizes, strict=True)]
        for tensors, sizes in zip(values[:middle], values[middle:], strict=True)
    ]


def _without_filling(
    tensors: Sequence[tf.Tensor],
    dimensions: Sequence[tf.Tensor],
    sizes: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Each chip's tensor, cut along a dimension to the chip's size.

    TPUStrategy fills inputs of unknown size up to the largest of the chips',
    and a TPU leaves the filling out of every result.
    """
    dimension = int(tf.get_static_value(dimensions[0]))
    before = (slice(None),) * dimension
    return [
        tensor[(*before, slice(size))]
        for tensor, size in zip(tensors, sizes, strict=True)
    ]


def _attributes(operation: tf.Operation) -> dict[str, Any]:
    attributes = {
        key: value
        for key, value in operation.node_def.attr.items()
        if key not in _DROPPED_ATTRIBUTES
    }
    if operation.type in _BRANCHES:
        # What was traced for XLA lacks this mark, without which the CPU has
        # a slower kernel for it.
        attributes["_lower_using_switch_merge"] = tf.compat.v1.AttrValue(b=True)
    return attributes


def _copy(
    operation: tf.Operation,
    inputs: Sequence[tf.Tensor],
    name: str,
    attributes: dict[str, Any],
) -> tf.Operation:
    if not on_host(operation):
        inputs = xla_indices.as_on_a_tpu(operation, inputs)
    return tf.compat.v1.get_default_graph().create_op(
        operation.type,
        list(inputs),
        [tensor.dtype for tensor in operation.outputs],
        name=name,
        attrs=attributes,
        op_def=operation.op_def,
    )
