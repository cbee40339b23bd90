"""Refuses in a traced replica what a TPU would refuse.

A TPU compiles a replica with XLA: all its operations but those of host blocks
(`tf.compat.v1.tpu.outside_compilation`, in which TPUEmbeddingV2 sorts a
batch). The CPU that runs it here could do much more, so after the replica is
traced every operation that the TPU would compile is looked at, those of
functions, branches and loops too:

* XLA has a kernel for the operation and its dtypes. That leaves out strings,
  ragged and sparse operations, printing, Python code, lookup tables. (With
  soft placement TensorFlow moves some of these to the host by itself, at the
  cost of transfers in every step; here that has to be said.)
* Its results have sizes that are known while it is compiled. A batch whose
  size the trace does not know is fine, as on a TPU, and so is a slice up to a
  length that only the run knows, which XLA bounds by what is sliced. Other
  sizes that depend on values are not, nor is a tensor of unknown size that a
  host block sends over or gets. On several chips TPUStrategy fills a dense
  input of unknown size up to the largest of the chips', and says on the TPU
  how much of it is real; so a host block cannot have that input.
* Parts of ragged and sparse inputs go to host blocks only.
* Variables were made under the strategy, and host blocks do not touch them.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import tensorflow as tf

from tf_distembed.testing import device_ops, xla_kernels
from tf_distembed.testing.private_tensorflow import (
    captured_value,
    function_graph,
    resource_name,
)
from tf_distembed.testing.replica_program import (
    INPUT_MARK,
    OUTPUT_MARK,
    REPLICA_MARK,
    ReplicaProgram,
    called_functions,
    has_mark,
    live_operations,
    on_host,
)

_SHOWN_PROBLEMS = 10
# XLA has these, with results as long as their values make them.
_SIZED_BY_VALUES = frozenset(
    {
        "DynamicPartition",
        "ListDiff",
        "Unique",
        "UniqueV2",
        "UniqueWithCounts",
        "UniqueWithCountsV2",
        "Where",
    }
)
# XLA bounds what these make by what they are given.
_SLICES = frozenset({"Slice", "StridedSlice"})
# The first input of these chooses the branch.
_BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
# What lies between a user's line and an operation.
_LIBRARIES = ("/tensorflow/", "/keras/", "/tf_distembed/testing/")


def check(program: ReplicaProgram, *, dynamic_batch: bool) -> None:
    """Raises if a TPU could not run the replica.

    Args:
        program: The replica's trace.
        dynamic_batch: Whether sizes of inputs may be unknown, as
            `tf.distribute.RunOptions` says.

    Raises:
        ValueError: Naming every operation at fault.
    """
    marks = _Marks()
    for tensor, composite in zip(
        program.inputs(), program.composite_inputs, strict=False
    ):
        if composite:
            marks.composite.add(tensor.name)
        elif not tensor.shape.is_fully_defined():
            (marks.dynamic if dynamic_batch else marks.refused).add(tensor.name)
    for outer, inner in program.graph.captures:
        if not inner.shape.is_fully_defined():
            marks.dynamic.add(inner.name)
        handle = captured_value(outer)
        if inner.dtype == tf.resource and not any(
            handle is new for new in program.new_handles
        ):
            marks.foreign[inner.name] = handle
    checker = _Checker(program)
    checker.check(program.live_operations(), marks, in_replica=False)
    checker.raise_problems()


@dataclasses.dataclass
class _Marks:
    """What is known of the tensors of one graph, by name.

    Attributes:
        composite: Parts of ragged and sparse inputs.
        dynamic: Sizes may be unknown, for those of the replica's inputs are,
            or those of a slice.
        refused: Inputs of unknown size where the RunOptions forbid it.
        host: Results of host blocks.
        device: Results of compiled operations.
        variables: Handles of the strategy's variables.
        foreign: Handles of other variables and resources, as captured.
    """

    composite: set[str] = dataclasses.field(default_factory=set)
    dynamic: set[str] = dataclasses.field(default_factory=set)
    refused: set[str] = dataclasses.field(default_factory=set)
    host: set[str] = dataclasses.field(default_factory=set)
    device: set[str] = dataclasses.field(default_factory=set)
    variables: set[str] = dataclasses.field(default_factory=set)
    foreign: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)

    def hand_over(
        self, source: tf.Tensor, target: tf.Tensor, other: "_Marks"
    ) -> None:
        """Marks `target` in `other` as `source` is marked here."""
        for marked, same in (
            (self.composite, other.composite),
            (self.dynamic, other.dynamic),
            (self.refused, other.refused),
            (self.host, other.host),
            (self.device, other.device),
            (self.variables, other.variables),
        ):
            if source.name in marked:
                same.add(target.name)
        if source.name in self.foreign:
            other.foreign[target.name] = self.foreign[source.name]


class _Checker:
    """Goes through the operations of a replica and collects problems."""

    def __init__(self, program: ReplicaProgram) -> None:
        self.program = program
        self.problems: list[str] = []
        self.named: set[str] = set()
        self.passed: list[tf.Operation] = []

    def raise_problems(self) -> None:
        """Raises what was found, all at once."""
        problems = list(dict.fromkeys(self.problems))
        if not problems:
            return
        lines = [f"  * {text}" for text in problems[:_SHOWN_PROBLEMS]]
        if len(problems) > _SHOWN_PROBLEMS:
            lines.append(f"  * and {len(problems) - _SHOWN_PROBLEMS} more")
        raise ValueError(
            "strategy.run: a TPU cannot do what this replica does.\n"
            + "\n".join(lines)
            + "\nPrepare such inputs in Dataset.map, or on the host inside "
            "the replica, with tf.compat.v1.tpu.outside_compilation."
        )

    def check(
        self,
        operations: Iterable[tf.Operation],
        marks: _Marks,
        in_replica: bool,
    ) -> None:
        """Checks the operations of one graph, in their order.

        `in_replica` says that all of them belong to the replica, as those of
        a function called by it do; else their mark tells.
        """
        for operation in operations:
            self.passed.append(operation)
            if operation.type in ("Placeholder", "TPUReplicatedInput"):
                (output,) = operation.outputs
                if output.name in self.program.variables and not in_replica:
                    marks.variables.add(output.name)
            elif not in_replica and not has_mark(operation, REPLICA_MARK):
                pass
            elif on_host(operation):
                self._check_host(operation, marks)
            elif has_mark(operation, INPUT_MARK):
                marks.hand_over(
                    operation.inputs[0], operation.outputs[0], marks
                )
            else:
                self._check_device(operation, marks)

    def _report(self, operation: tf.Operation, text: str) -> None:
        # An operation that TensorFlow adds has no line of a user's.
        lines = (_user_line(passed) for passed in reversed(self.passed))
        place = next((line for line in lines if line), "")
        subject = f"{operation.type} {operation.name!r}{place}"
        if has_mark(operation, OUTPUT_MARK):
            subject = "What the replica returns"
        self.problems.append(f"{subject}: {text}")

    def _check_host(self, operation: tf.Operation, marks: _Marks) -> None:
        marks.host.update(output.name for output in operation.outputs)
        for tensor in operation.inputs:
            if tensor.name in marks.variables:
                copies = self.program.variables.get(tensor.name)
                name = f" ({copies[0].name!r})" if copies else ""
                self._report(
                    operation,
                    "a host block reads or writes a variable of the strategy"
                    f"{name}, which lives on the TPU. Read it outside the "
                    "block.",
                )
            elif (
                tensor.name in marks.device
                and not tensor.shape.is_fully_defined()
            ):
                self._report(
                    operation,
                    "a host block gets a tensor that the TPU computes, of "
                    f"shape {tensor.shape}; all its sizes must be known. Give "
                    "it the replica's input as it is; on several chips a "
                    "ragged or sparse one, or a dense one of known size.",
                )

    def _check_device(self, operation: tf.Operation, marks: _Marks) -> None:
        if not xla_kernels.has_kernel(operation):
            dtypes = {
                tensor.dtype.name
                for tensor in [*operation.inputs, *operation.outputs]
            }
            self._report(
                operation,
                "XLA has no kernel for it with dtypes "
                f"{', '.join(sorted(dtypes))}.",
            )
        for tensor in operation.inputs:
            self._check_input(operation, tensor, marks)
        self._check_sizes(operation, marks)
        given = list(operation.inputs)
        if operation.type in _BRANCHES:
            given = given[1:]
        for name in called_functions(operation):
            self._check_function(name, given, marks)

    def _check_input(
        self, operation: tf.Operation, tensor: tf.Tensor, marks: _Marks
    ) -> None:
        known = tensor.shape.is_fully_defined()
        if tensor.name in marks.foreign:
            name = resource_name(marks.foreign[tensor.name])
            if name not in self.named:
                self._report(
                    operation,
                    f"{name} was not made under the strategy. Make it inside "
                    "`with strategy.scope():`.",
                )
            self.named.add(name)
        elif tensor.name in marks.composite and not known:
            self._report(
                operation,
                "takes a part of a ragged or sparse input, of shape "
                f"{tensor.shape}. Use such inputs in host blocks only.",
            )
        elif tensor.name in marks.refused:
            self._report(
                operation,
                f"takes an input of shape {tensor.shape}; with these "
                "RunOptions all its sizes must be known.",
            )
        elif (
            tensor.name in marks.host
            and not known
            # Which takes the sorted batch, the one thing of unknown size
            # that a TPU accepts from its host.
            and not device_ops.is_sparsecore_op(operation.type)
        ):
            self._report(
                operation,
                f"takes a tensor of shape {tensor.shape} from a host block; "
                "all its sizes must be known.",
            )

    def _check_sizes(self, operation: tf.Operation, marks: _Marks) -> None:
        dynamic = any(t.name in marks.dynamic for t in operation.inputs)
        if operation.type in _SLICES:
            (result,), sliced = operation.outputs, operation.inputs[0]
            dynamic |= (
                sliced.shape.is_fully_defined()
                and result.shape.rank is not None
                and not result.shape.is_fully_defined()
            )
        # What follows from an unknown size was reported where that began.
        reported = any(not t.shape.is_fully_defined() for t in operation.inputs)
        for output in operation.outputs:
            marks.device.add(output.name)
            if dynamic:
                marks.dynamic.add(output.name)
            if output.shape.is_fully_defined():
                continue
            if operation.type in _SIZED_BY_VALUES or not (dynamic or reported):
                self._report(
                    operation,
                    f"its result has shape {output.shape}; all sizes must be "
                    "known when it is compiled.",
                )

    def _check_function(
        self, name: str, given: Sequence[tf.Tensor], marks: _Marks
    ) -> None:
        body = function_graph(name, self.program.graph)
        inner = _Marks()
        for tensor, placeholder in zip(given, body.inputs, strict=True):
            marks.hand_over(tensor, placeholder, inner)
            if not placeholder.shape.is_fully_defined():
                # Traced for any size, and called with one that is known.
                inner.dynamic.add(placeholder.name)
        self.check(
            live_operations(
                body.get_operations(), [t.op for t in body.outputs]
            ),
            inner,
            in_replica=True,
        )


def _user_line(operation: tf.Operation) -> str:
    """Where an operation was made, outside of TensorFlow and Keras."""
    for frame in reversed(operation.traceback or ()):
        path = frame.filename.replace("\\", "/")
        if not any(folder in path for folder in _LIBRARIES):
            return f" ({frame.filename}:{frame.lineno})"
    return ""
