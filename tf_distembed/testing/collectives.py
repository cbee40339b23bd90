"""The operations in which all chips of a replica program exchange values."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

TYPES = frozenset({"CrossReplicaSum", "AllToAll", "CollectivePermute"})


def collective(
    operation: tf.Operation, values: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """The result of a collective operation on every chip.

    Args:
        operation: As it was traced; its second input, a constant, says which
            chips take part together: `[groups, chips of a group]`, or for
            CollectivePermute the `[source, target]` pairs.
        values: The first input of each chip.
    """
    participants = tf.get_static_value(operation.inputs[1])
    if participants is None:
        raise NotImplementedError(
            f"Operation {operation.name!r} ({operation.type}): the emulator "
            "needs its group of chips as a constant."
        )
    if operation.type == "CollectivePermute":
        return _permute(values, participants)
    results: list[tf.Tensor] = list(values)
    for group in participants.tolist():
        if operation.type == "CrossReplicaSum":
            total = tf.add_n([values[chip] for chip in group])
            exchanged = [total] * len(group)
        else:
            exchanged = _all_to_all(
                [values[chip] for chip in group],
                operation.get_attr("split_dimension"),
                operation.get_attr("concat_dimension"),
            )
        for chip, value in zip(group, exchanged, strict=True):
            results[chip] = value
    return results


def _all_to_all(
    values: Sequence[tf.Tensor], split_dimension: int, concat_dimension: int
) -> list[tf.Tensor]:
    """Chip i gets the i-th part of every chip's value."""
    parts = [
        tf.split(value, len(values), axis=split_dimension) for value in values
    ]
    return [
        tf.concat([part[chip] for part in parts], axis=concat_dimension)
        for chip in range(len(values))
    ]


def _permute(values: Sequence[tf.Tensor], pairs: np.ndarray) -> list[tf.Tensor]:
    """Chips that no pair names as a target get zeros."""
    results = [tf.zeros_like(value) for value in values]
    for source, target in pairs.tolist():
        results[target] = values[source]
    return results
