"""Rows that a lookup has read, handed to the update of the same step.

The update needs the touched rows, which the lookup has already read, each
once. It may use those only if they are still what the table holds, and may
take the ids for distinct only if they are that lookup's alone. Both are read
from the graph being traced: from an unchanged tensor of ids, and from what
else the graph does to the table. When in doubt, nothing is handed over.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import tensorflow as tf

#: The graph's own collection of lookups, so that none outlives its graph.
_COLLECTION = "tf_distembed/lookups"
#: What leaves the variable it is given as it is.
_READS = {"ReadVariableOp", "ResourceGather", "VariableShape"}


class Lookup(NamedTuple):
    """Distinct ids `[U]` and the rows `[U, D]` read for them."""

    ids: tf.Tensor
    rows: tf.Tensor


def remember(table: Any, ids: tf.Tensor, rows: tf.Tensor) -> None:
    """Notes what a lookup read.

    Args:
        table: The object that was asked for the rows.
        ids: `[U]`, no two equal.
        rows: `[U, D]`, as `tf.gather(table.value, ids)` gave them.
    """
    if tf.executing_eagerly():
        return
    entry = (weakref.ref(table), Lookup(ids, rows))
    rows.graph.add_to_collection(_COLLECTION, entry)


def recall(table: Any, ids: tf.Tensor) -> Lookup | None:
    """The lookup that alone made a gradient, if its rows are still current.

    Args:
        table: The object whose gradient it is.
        ids: The gradient's `indices`.
    """
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    if getattr(ids, "graph", None) is not graph:
        return None
    # The gradient of a gather reshapes its ids to rank 1, which they have.
    while ids.op.type in ("Identity", "Reshape"):
        ids = ids.op.inputs[0]
    for owner, lookup in tf.compat.v1.get_collection(_COLLECTION):
        # A function's graph begins with the collections of the one around it.
        is_same = lookup.ids.graph is graph and lookup.ids.name == ids.name
        if owner() is table and is_same and _is_only_read(lookup.rows):
            return lookup
    return None


def _is_only_read(rows: tf.Tensor) -> bool:
    """Whether the graph so far has nothing that may write to the table.

    A call of another function, a branch or a loop may.
    """
    gather = rows.op
    while gather.type == "Identity":
        gather = gather.inputs[0].op
    if gather.type != "ResourceGather":
        return False
    return all(op.type in _READS for op in gather.inputs[0].consumers())
