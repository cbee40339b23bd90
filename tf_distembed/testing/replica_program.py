"""One replica as `tpu.replicate` traced it, and how to read it."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_distembed.testing import collectives, device_ops
from tf_distembed.testing.private_tensorflow import FuncGraph

# Marks that TensorFlow sets on operations: in the replica, in a host block of
# it, and the identities through which tensors enter and leave the replica.
REPLICA_MARK = "_tpu_replicate"
HOST_MARK = "_xla_outside_compilation"
INPUT_MARK = "_tpu_input_identity"
OUTPUT_MARK = "_tpu_output_identity"

# Part of the frame that tpu.replicate puts around a replica.
_FRAME = frozenset({"TPUReplicateMetadata", "TPUCompilationResult"})


@dataclasses.dataclass(frozen=True)
class ReplicaProgram:
    """One replica as `tpu.replicate` traced it.

    Attributes:
        graph: The trace; what it takes from outside are its captures.
        result: What `strategy.run` is to return, as tensors of `graph`.
        variables: For each variable read or written inside: the name of its
            handle in `graph` -> its copies, one a chip.
        new_handles: Handles of variables made while tracing. They are made
            outside the replica, but the trace has a fallback that gives them
            their first value.
        composite_inputs: For each tensor put into the replica, in order:
            whether it is a part of a ragged or sparse tensor.
    """

    graph: FuncGraph
    result: Any
    variables: dict[str, list[tf.Variable]]
    new_handles: list[tf.Tensor]
    composite_inputs: list[bool]

    def inputs(self) -> list[tf.Tensor]:
        """The tensors put into the replica, in order, without variables."""
        return [
            operation.outputs[0]
            for operation in self.graph.get_operations()
            if operation.type == "TPUReplicatedInput"
            and operation.outputs[0].name not in self.variables
        ]

    def live_operations(self) -> list[tf.Operation]:
        """What has to be done for the result and for its side effects."""
        results = tf.nest.flatten(self.result, expand_composites=True)
        return live_operations(
            self.graph.get_operations(),
            [t.op for t in results if isinstance(t, tf.Tensor)],
        )


def has_mark(operation: tf.Operation, name: str) -> bool:
    """Whether an operation carries an attribute its definition lacks."""
    try:
        operation.get_attr(name)
    except ValueError:
        return False
    return True


def on_host(operation: tf.Operation) -> bool:
    """Whether an operation stands in a host (outside compiled) block."""
    return has_mark(operation, HOST_MARK)


def is_meeting(kind: str) -> bool:
    """Whether chips exchange values in an operation of this type."""
    return kind in collectives.TYPES or device_ops.is_sparsecore_op(kind)


def called_functions(operation: tf.Operation) -> list[str]:
    """The names of the functions that an operation calls."""
    names: list[str] = []
    for attribute in operation.op_def.attr:
        if attribute.type == "func":
            names.append(operation.get_attr(attribute.name).name)
        elif attribute.type == "list(func)":
            names += [f.name for f in operation.get_attr(attribute.name)]
    return names


def live_operations(
    operations: Iterable[tf.Operation], wanted: Iterable[tf.Operation]
) -> list[tf.Operation]:
    """The wanted operations, those with side effects, and what they need.

    In the order in which they were made, on which reads and writes of
    variables depend. Assertions outside a host block are left out: a TPU
    compiles them to nothing.
    """
    operations = list(operations)
    roots = [
        operation
        for operation in operations
        if operation.op_def.is_stateful
        and operation.type != "ReadVariableOp"
        and not _is_ignored(operation)
    ]
    live = {operation.name for operation in _with_needed([*roots, *wanted])}
    # Almost always the order already is one in which every operation comes
    # after all it needs, but for control dependencies nothing promises it.
    return _with_needed(o for o in operations if o.name in live)


def _with_needed(operations: Iterable[tf.Operation]) -> list[tf.Operation]:
    """The operations in their order, each after all that it needs."""
    ordered: list[tf.Operation] = []
    seen: set[str] = set()
    for first in operations:
        stack = [(first, False)]
        while stack:
            operation, done = stack.pop()
            if done:
                ordered.append(operation)
            elif operation.name not in seen:
                seen.add(operation.name)
                stack.append((operation, True))
                needed = [tensor.op for tensor in operation.inputs]
                needed += operation.control_inputs
                stack += [
                    (other, False) for other in needed if not _is_ignored(other)
                ]
    return ordered


def _is_ignored(operation: tf.Operation) -> bool:
    if operation.type in _FRAME:
        return True
    return operation.type == "Assert" and not on_host(operation)
