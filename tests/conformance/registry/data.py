"""Rows and weights that many cases use, and features made from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.conformance.cases import BATCH, DEFAULT_DEVICE, STEPS, Feature, Table

Rows = Sequence[Sequence]


def _ids_of_steps(
    rows: Rows, vocabulary: int, batches: Sequence[int]
) -> tuple[Rows, ...]:
    """Each step: other rows of the batch, other rows of the table."""

    def shifted(value: int, step: int) -> int:
        if not 0 <= value < vocabulary:
            return value
        return (value + 5 * step) % vocabulary

    return tuple(
        [[shifted(i, step) for i in row] for row in turned]
        for step, turned in enumerate(_turned(rows, batches))
    )


def _turned(rows: Rows, batches: Sequence[int]) -> list[Rows]:
    return [
        [*rows[3 * step :], *rows[: 3 * step]][:batch]
        for step, batch in enumerate(batches)
    ]


def cells(rows: Rows, order: str) -> tuple[list, list]:
    """Rows -> (row, column, value) triples: with gaps, in a given order."""
    triples = [
        (row, 2 * place + row % 2, value)
        for row, values in enumerate(rows)
        for place, value in enumerate(values)
    ]
    if order == "reversed":
        triples = triples[::-1]
    elif order == "shuffled":
        triples = triples[1::2] + triples[::2]
    return [t[:2] for t in triples], [t[2] for t in triples]


def feature(
    name: str,
    table: Table,
    kind: str,
    rows: Rows,
    weights: Rows | None = None,
    *,
    order: str = "sorted",
    batches: Sequence[int] = (BATCH,) * STEPS,
    **options,
) -> Feature:
    """A feature whose three steps are made from the rows of one."""
    ids = _ids_of_steps(rows, table.vocabulary, batches)
    weights = None if weights is None else tuple(_turned(weights, batches))
    if kind == "sparse":
        # Ids and weights go into the same cells.
        if weights is not None:
            weights = tuple(cells(w, order)[1] for w in weights)
        ids = tuple(
            [
                (*cell, value)
                for cell, value in zip(*cells(i, order), strict=True)
            ]
            for i in ids
        )
    return Feature(name, table.name, kind, ids, weights, **options)


#: Repeated ids in a bag and across bags; empty rows, also the last.
BAGS = [[3, 3, 1], [5], [], [0, 7, 7, 3], [2, 1], [], [9, 4], []]

#: Weights for BAGS: zero, negative, and in row 6 with sum zero.
WEIGHTS = [
    [0.5, 2.0, 1.0], [3.0], [], [1.0, 0.25, -0.5, 2.0], [0.0, 1.5], [],
    [1.5, -1.5], [],
]  # fmt: skip

#: Positive weights for BAGS.
POSITIVE = [
    [0.5, 2.0, 1.0], [3.0], [], [1.0, 0.25, 0.75, 2.0], [4.0, 1.5], [],
    [1.5, 0.5], [],
]  # fmt: skip

GRID = [
    [3, 3, 1], [5, 0, 2], [7, 7, 7], [1, 9, 3], [2, 1, 8], [6, 4, 3],
    [9, 4, 0], [10, 3, 11],
]  # fmt: skip

GRID_WEIGHTS = [
    [0.5, 2.0, 1.0], [3.0, 0.0, 1.0], [1.0, 0.25, -0.5], [2.0, 1.0, 1.0],
    [0.0, 0.0, 0.0], [1.5, -1.0, 2.0], [1.0, -1.5, 0.5], [-1.0, -2.0, -0.5],
]  # fmt: skip

SINGLE = [[3], [1], [3], [0], [7], [3], [2], [1]]
SINGLE_WEIGHTS = [[2.0], [0.0], [-1.0], [0.5], [1.0], [3.0], [-2.0], [1.5]]

#: -1 everywhere, ids just and far beyond, ids that narrow to good ones.
INVALID = [
    [3, -1, 1], [12, 5], [-1], [0, 7, 12, 3], [2**32 + 1, 2, 1], [],
    [9, 2**31, 4], [-(2**31), 2**63 - 1],
]  # fmt: skip
INVALID_WEIGHTS = [
    [0.5, 2.0, 1.0], [4.0, 3.0], [2.0], [1.0, 0.25, -0.5, 2.0],
    [2.5, 0.5, 1.5], [], [1.5, 2.0, 1.0], [1.0, 1.0],
]  # fmt: skip
INVALID_GRID = [
    [3, -1, 1], [12, 5, 2], [-1, -1, -1], [0, 7, 3], [2**32 + 1, 2, 1],
    [-5, 40, 6], [9, 2**31, 4], [-(2**31), 2**63 - 1, 8],
]  # fmt: skip

#: Longer than three, for features declared (B, 3).
LONG = [
    [3, 3, 1, 8, 5], [5], [1, 2, 3, 4], [0, 7, 7, 3, 1, 2], [2, 1], [],
    [9, 4, 11], [10, 6, 6, 6],
]  # fmt: skip
LONG_WEIGHTS = [
    [0.5, 2.0, 1.0, 3.0, -2.0], [3.0], [1.0, 2.0, 0.5, 4.0],
    [1.0, 0.25, 0.5, 2.0, -1.0, 2.0], [0.0, 1.5], [], [1.5, -1.0, 1.0],
    [1.0, 2.0, 3.0, 4.0],
]  # fmt: skip

#: Rows of the three steps of the layer "batches".
SHORT_BATCHES = (BATCH, 3, 0)

COMBINERS = ("sum", "mean", "sqrtn")
KINDS = ("dense", "ragged", "sparse")


def rows_for(kind: str) -> tuple[Rows, Rows]:
    """Ids and weights that the kind can hold."""
    return (GRID, GRID_WEIGHTS) if kind == "dense" else (BAGS, WEIGHTS)


def combiners_for(kind: str) -> tuple[str, ...]:
    """All for ragged, mean alone for the other kinds.

    Kinds differ in how bags are made, not in how they are combined; the
    section "Kinds" has every combiner with every kind.
    """
    return COMBINERS if kind == "ragged" else ("mean",)


def on_default_device(reason: str) -> dict[str, Any]:
    """Arguments of a case that SparseCore cannot run, and why."""
    return {"backends": (DEFAULT_DEVICE,), "reason": reason}
