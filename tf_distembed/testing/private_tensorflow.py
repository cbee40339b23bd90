"""Every private part of TensorFlow that the emulator touches, in one place.

`tf_distembed.testing` imports private modules here and nowhere else, so that
a new TensorFlow release is checked by reading this file. All of it exists in
2.20 and 2.21.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf.tpu.topology_pb2 import TPUHardwareFeature
from tensorflow.python.distribute.tpu_strategy import TPUExtended
from tensorflow.python.framework import kernels
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.tpu import tpu_embedding_v3, tpu_replication
from tensorflow.python.tpu.ops import gen_xla_ops

__all__ = [
    "HOOKS",
    "FuncGraph",
    "TPUExtended",
    "TPUHardwareFeature",
    "add_function",
    "captured_value",
    "copy_on_each",
    "function_graph",
    "functions_of",
    "gen_xla_ops",
    "registered_kernels",
    "resource_name",
    "tpu_embedding_v3",
    "tpu_replication",
]

# What the emulator replaces while its context lasts, or overrides in a
# subclass: (owner, attribute, name to show when it is missing).
HOOKS: tuple[tuple[Any, str, str], ...] = (
    (
        tpu_embedding_v3,
        "xla_ops",
        "tensorflow.python.tpu.tpu_embedding_v3.xla_ops",
    ),
    (
        tpu_replication.TPUReplicateContext,
        "get_replicated_var_handle",
        "tensorflow.python.tpu.tpu_replication.TPUReplicateContext"
        ".get_replicated_var_handle",
    ),
    (
        TPUExtended,
        "_tpu_function_creator",
        "tensorflow.python.distribute.tpu_strategy.TPUExtended"
        "._tpu_function_creator",
    ),
)


def registered_kernels(op_type: str) -> Sequence[Any]:
    """The kernels of an operation in this wheel, XLA's only once it started."""
    return kernels.get_registered_kernels_for_op(op_type).kernel


def functions_of(graph: tf.Graph) -> Iterator[Any]:
    """The functions that operations of `graph` call."""
    yield from graph._functions.values()


def add_function(graph: tf.Graph, function: Any) -> None:
    """Lets operations of `graph` call `function`."""
    graph._add_function_recursive(function)


def function_graph(name: str, graph: tf.Graph | None) -> FuncGraph:
    """The trace of a function that an operation of `graph` calls."""
    while graph is not None:
        function = graph._functions.get(name)
        if function is not None:
            return function.graph
        graph = getattr(graph, "outer_graph", None)
    raise RuntimeError(f"Function {name!r} is not known here.")


def captured_value(tensor: tf.Tensor) -> tf.Tensor:
    """What a tensor was before functions took it in as an argument."""
    while tf.is_symbolic_tensor(tensor):
        for outer, inner in getattr(tensor.graph, "captures", ()):
            if inner is tensor:
                tensor = outer
                break
        else:
            break
    return tensor


def resource_name(handle: tf.Tensor) -> str:
    """What an eager resource handle belongs to, for a message."""
    # Handles know their name, but show it in their text only, as "name/0".
    found = re.search(
        r'name="(?P<name>[^"]*?)(/\d+)?", .*type="(?P<type>[^"]*)"',
        repr(handle),
    )
    if found is None:
        return "A resource"
    if found["type"].endswith("::Var"):
        return f"Variable {found['name']!r}"
    return f"Resource {found['name']!r} ({found['type']})"


def copy_on_each(variable: Any, devices: Sequence[str]) -> list[tf.Variable]:
    """A distributed variable's copy on each device.

    Args:
        variable: What `TPUReplicateContext.get_replicated_var_handle` gets:
            a list of copies, or of one `PackedDistributedVariable`.
        devices: One for each copy.
    """
    first = variable[0]
    if hasattr(first, "get_var_on_device"):
        return [first.get_var_on_device(device) for device in devices]
    return list(variable)
