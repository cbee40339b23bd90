"""The flat names under which a served model takes and gives its tensors.

A signature of TensorFlow Serving holds dense tensors by name. A ragged or
sparse one is taken apart into several:

```
dense   <name>
ragged  <name>_values, <name>_row_splits
sparse  <name>_indices, <name>_values, <name>_dense_shape
```

A name is the keys of a value's path joined by `_`. What TensorFlow cannot
have in a name of a signature becomes `_`.
"""

from __future__ import annotations

import dataclasses
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_distembed import structures
from tf_distembed.inputs import DENSE, RAGGED, SPARSE, kind_of

# What Keras calls an input that the user gave no name.
_AUTOMATIC = re.compile(r"(keras_tensor|input_layer)(_\d+)*$")


@dataclasses.dataclass(frozen=True)
class ServedInput:
    """One input of a served model.

    Attributes:
        name: What its names begin with.
        kind: `"dense"`, `"ragged"` or `"sparse"`.
        shape: With the batch, sizes or None.
        dtype: Name of its dtype.
        row_splits_dtype: Of a ragged one.
    """

    name: str
    kind: str
    shape: tuple[int | None, ...]
    dtype: str
    row_splits_dtype: str = "int64"

    def specs(self) -> dict[str, tf.TensorSpec]:
        """Name in the signature -> spec of each of its tensors."""
        shapes: dict[str, tuple[tuple[int | None, ...], str]]
        if self.kind == DENSE:
            shapes = {self.name: (self.shape, self.dtype)}
        elif self.kind == RAGGED:
            batch = self.shape[0]
            splits = None if batch is None else batch + 1
            shapes = {
                f"{self.name}_values": ((None, *self.shape[2:]), self.dtype),
                f"{self.name}_row_splits": ((splits,), self.row_splits_dtype),
            }
        else:
            rank = len(self.shape)
            shapes = {
                f"{self.name}_indices": ((None, rank), "int64"),
                f"{self.name}_values": ((None,), self.dtype),
                f"{self.name}_dense_shape": ((rank,), "int64"),
            }
        return {
            name: tf.TensorSpec(shape, dtype, name=name)
            for name, (shape, dtype) in shapes.items()
        }

    def assemble(self, tensors: Mapping[str, tf.Tensor]) -> Any:
        """The input, out of the tensors that `specs` names."""
        parts = [tensors[name] for name in self.specs()]
        if self.kind == DENSE:
            return parts[0]
        if self.kind == RAGGED:
            return tf.RaggedTensor.from_row_splits(*parts)
        sparse = tf.SparseTensor(*parts)
        sparse.set_shape(self.shape)
        return sparse


def served_inputs(model: Any, signature: Any) -> tuple[Any, list[ServedInput]]:
    """The structure of a model's inputs, and the inputs in flat order.

    Args:
        model: A Keras model or layer.
        signature: None, to ask the model; else its inputs as specs or Keras
            tensors, in the structure in which it takes them.

    Raises:
        TypeError: a leaf of `signature` that is no spec.
        ValueError: the model does not know its inputs and no signature is
            given; an input that cannot be served; or two inputs of one name.
    """
    given = _inputs_of(model) if signature is None else signature
    inputs = [
        _served(name, leaf)
        for name, leaf in _named_leaves(given, "inputs", "input", _own_name)
    ]
    if not inputs:
        raise ValueError(f"'{model.name}' has no inputs to serve.")
    _check_distinct([name for one in inputs for name in one.specs()], "inputs")
    return structures.map_leaves(given, lambda _: None), inputs


def flat_outputs(outputs: Any) -> dict[str, tf.Tensor]:
    """Name in the signature -> tensor, of what a model returned.

    Raises:
        ValueError: something that is no tensor, or two tensors of one name.
    """
    named = [
        part
        for name, leaf in _named_leaves(
            outputs, "output_0", "output", lambda _: None
        )
        for part in _parts_of(name, leaf)
    ]
    _check_distinct([name for name, _ in named], "outputs")
    return dict(named)


def _named_leaves(
    structure: Any,
    alone: str,
    numbered: str,
    own_name: Callable[[Any], str | None],
) -> list[tuple[str, Any]]:
    """(name, leaf) of every leaf: its keys, or its own name for a number.

    Args:
        structure: Nested dicts, lists, tuples and namedtuples.
        alone: Name of a lone leaf that has none of its own.
        numbered: What a number at the top of the structure is put behind.
        own_name: A leaf's own name, or None.
    """
    named = []
    for labels, leaf in _labelled(structure):
        by_number = not labels or isinstance(labels[-1], int)
        own = own_name(leaf) if by_number else None
        if own is not None:
            labels = (*labels[:-1], own)
        elif not labels:
            labels = (alone,)
        elif isinstance(labels[0], int):
            labels = (numbered, *labels)
        named.append((_allowed("_".join(map(str, labels))), leaf))
    return named


def _own_name(leaf: Any) -> str | None:
    if not isinstance(leaf, (keras.KerasTensor, tf.TensorSpec)):
        return None
    name = leaf.name
    return None if not name or _AUTOMATIC.match(name) else name


def _labelled(
    structure: Any, labels: tuple[Any, ...] = ()
) -> list[tuple[tuple[Any, ...], Any]]:
    """(labels, leaf): keys as strings, fields of namedtuples, numbers."""
    children: list[tuple[Any, Any]]
    if isinstance(structure, Mapping):
        children = [(str(key), structure[key]) for key in structure]
    elif isinstance(structure, tuple) and hasattr(structure, "_fields"):
        children = list(zip(structure._fields, structure, strict=True))
    elif isinstance(structure, (list, tuple)):
        children = list(enumerate(structure))
    else:
        return [(labels, structure)]
    return [
        leaf
        for label, child in children
        for leaf in _labelled(child, (*labels, label))
    ]


def _allowed(name: str) -> str:
    """`name` as TensorFlow takes it for an argument of a signature."""
    allowed = re.sub("[^0-9A-Za-z]", "_", name)
    if not allowed[:1].isalpha():
        allowed = "arg_" + allowed
    if keyword.iskeyword(allowed) or allowed == "self":
        allowed += "_"
    return allowed


def _inputs_of(model: Any) -> Any:
    unknown = ValueError(
        f"'{model.name}' does not say what inputs it takes; only functional "
        "and Sequential models do. Give signature=, the structure of its "
        "inputs with a tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec "
        "or keras.Input as leaves, for example "
        "{'movie': tf.RaggedTensorSpec([None, None], tf.int64)}."
    )
    try:
        if isinstance(model, keras.Sequential):
            return model.inputs[0]
        if isinstance(model, keras.Model):
            return model.input
    except (AttributeError, ValueError) as error:
        raise unknown from error
    raise unknown


def _served(name: str, leaf: Any) -> ServedInput:
    if isinstance(leaf, (keras.KerasTensor, tf.TensorSpec)):
        kind = kind_of(leaf)
    elif isinstance(leaf, tf.RaggedTensorSpec):
        kind = RAGGED
    elif isinstance(leaf, tf.SparseTensorSpec):
        kind = SPARSE
    else:
        raise TypeError(
            f"signature: input '{name}' must be a tf.TensorSpec, "
            "tf.RaggedTensorSpec, tf.SparseTensorSpec or keras.Input. "
            f"Received: {leaf!r} (of type {type(leaf).__name__})"
        )
    shape = tf.TensorShape(leaf.shape)
    if shape.rank is None:
        raise ValueError(
            f"Input '{name}' is of unknown rank. Give its spec a shape, with "
            "None for sizes that vary."
        )
    served = ServedInput(
        name, kind, tuple(shape.as_list()), tf.as_dtype(leaf.dtype).name
    )
    if kind != RAGGED:
        return served
    # Keras leaves it None; its ragged inputs have one ragged dimension.
    ragged_rank = getattr(leaf, "ragged_rank", None) or 1
    if ragged_rank != 1 or shape.rank < 2:
        raise ValueError(
            f"Input '{name}' must be ragged in dimension 1 only to be served. "
            f"Received: ragged_rank={ragged_rank}, shape {served.shape}"
        )
    if isinstance(leaf, tf.RaggedTensorSpec):
        dtype = leaf.row_splits_dtype.name
        served = dataclasses.replace(served, row_splits_dtype=dtype)
    return served


def _parts_of(name: str, leaf: Any) -> list[tuple[str, Any]]:
    if isinstance(leaf, tf.RaggedTensor) and leaf.ragged_rank == 1:
        return [
            (f"{name}_values", leaf.values),
            (f"{name}_row_splits", leaf.row_splits),
        ]
    if isinstance(leaf, tf.SparseTensor):
        return [
            (f"{name}_indices", leaf.indices),
            (f"{name}_values", leaf.values),
            (f"{name}_dense_shape", leaf.dense_shape),
        ]
    if isinstance(leaf, tf.Tensor):
        # A tensor that is an input too needs a name of its own.
        return [(name, tf.identity(leaf))]
    raise ValueError(
        f"The model's output '{name}' cannot be served: "
        "it must be a tensor (ragged in dimension 1 only, if ragged). "
        f"Received: {leaf!r} (of type {type(leaf).__name__})"
    )


def _check_distinct(names: Sequence[str], what: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        cure = (
            "Name them apart with signature=."
            if what == "inputs"
            else "Return them under other keys."
        )
        raise ValueError(
            f"Two {what} of the model would be served under one name: {twice}."
            f" {cure}"
        )
