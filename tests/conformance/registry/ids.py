"""Section "Ids": integer types, ids outside the table."""

from __future__ import annotations

import numpy as np

from tests.conformance.cases import BATCH, Case, Feature, Table
from tests.conformance.registry.data import (
    BAGS,
    GRID_WEIGHTS,
    INVALID,
    INVALID_GRID,
    INVALID_WEIGHTS,
    KINDS,
    Rows,
    cells,
    combiners_for,
    feature,
    on_default_device,
)

#: Every type with ragged ids; the widest with all kinds.
ID_TYPES = {
    "dense": ("int32", "int64", "uint64"),
    "ragged": (
        "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64",
        "uint64",
    ),
    "sparse": ("int64", "uint64"),
}  # fmt: skip


def _as_type(rows: Rows, dtype: str) -> Rows:
    """The rows with each id that the type cannot hold replaced.

    By one outside the table, like it: the type's least or greatest value.
    """
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return [
        [i if low <= i <= high else int(low or high) for i in row]
        for row in rows
    ]


def _touching_the_edges_first(kind: str, table: Table) -> Feature:
    """First and last row get a moment in step 0, later only bad ids come."""
    steps: list[Rows] = [
        [[0, 11], [3, 5], *[[4, 6]] * 6],
        [[-1, 3], [12, 5], *[[-7, 2**40]] * 6],
        [[-1, 13], [4, 12], *[[2**32, 2**32 + 11]] * 6],
    ]
    ids = steps
    if kind == "sparse":
        ids = [
            [
                (*cell, i)
                for cell, i in zip(*cells(rows, "reversed"), strict=True)
            ]
            for rows in steps
        ]
    return Feature("f", table.name, kind, tuple(ids), invalid_ids="drop")


def cases_of_ids() -> list[Case]:
    """The cases of this section."""
    cases = []
    for kind in KINDS:
        rows = INVALID_GRID if kind == "dense" else INVALID
        weights = GRID_WEIGHTS if kind == "dense" else INVALID_WEIGHTS
        a, b = (Table(name, 12, 4, "mean") for name in "ab")
        total = Table("total", 12, 4, "sum")
        of_combiners = [
            Table(name, 12, 4, name) for name in combiners_for(kind)
        ]
        cases += [
            Case(
                f"{kind}_ids_of_any_type_outside_the_table_are_dropped",
                "adagrad",
                (a,),
                tuple(
                    feature(
                        dtype,
                        a,
                        kind,
                        _as_type(rows, dtype),
                        dtype=dtype,
                        invalid_ids="drop",
                    )
                    for dtype in ID_TYPES[kind]
                ),
                shows=(
                    "ids are clamped",
                    "ids wrap",
                    "ids are narrowed before the check",
                    "a dropped id counts in the denominator",
                ),
            ),
            Case(
                f"{kind}_weights_of_dropped_ids_go_too",
                "adagrad",
                tuple(of_combiners),
                tuple(
                    feature(
                        f"f_{t.name}",
                        t,
                        kind,
                        rows,
                        weights,
                        order="shuffled",
                        weights_gradient=True,
                        invalid_ids="drop",
                    )
                    for t in of_combiners
                ),
                shows=(
                    "weights are not dropped alongside",
                    "a dropped id counts in the denominator",
                ),
            ),
            Case(
                f"{kind}_dropped_ids_leave_no_gap",
                "adagrad",
                (total,),
                (
                    feature(
                        "f",
                        total,
                        kind,
                        rows,
                        weights,
                        invalid_ids="drop",
                        output_shape=(BATCH, 3, 4),
                    ),
                ),
                shows=("gaps stay", "weights are not dropped alongside"),
            ),
            Case(
                f"{kind}_dropped_ids_touch_nothing",
                "adam",
                (a,),
                (_touching_the_edges_first(kind, a),),
                shows=("dropped ids touch a row",),
            ),
        ]
        if kind != "dense":
            cases.append(
                Case(
                    f"{kind}_drop_comes_before_the_cut",
                    "adagrad",
                    (a, b),
                    (
                        feature(
                            "f",
                            a,
                            kind,
                            INVALID,
                            INVALID_WEIGHTS,
                            weights_gradient=True,
                            invalid_ids="drop",
                            input_shape=(BATCH, 2),
                        ),
                        feature(
                            "unreduced",
                            b,
                            kind,
                            INVALID,
                            invalid_ids="drop",
                            output_shape=(BATCH, 2, 4),
                        ),
                    ),
                    shows=("the cut comes before the drop",),
                )
            )

    left, right = Table("left", 12, 4, code=3), Table("right", 30, 4, code=9)
    cases += [
        Case(
            "no_id_reads_another_table",
            "adagrad",
            (left, right),
            (
                feature("f", left, "dense", INVALID_GRID, invalid_ids="drop"),
                feature(
                    "g",
                    right,
                    "dense",
                    [
                        [i + 18 if 0 <= i < 12 else i for i in row]
                        for row in INVALID_GRID
                    ],
                    invalid_ids="drop",
                ),
            ),
            shows=("ids are clamped", "ids wrap"),
        ),
        Case(
            "one_feature_drops_and_one_checks",
            "adagrad",
            (left,),
            (
                feature("f", left, "ragged", INVALID, invalid_ids="drop"),
                feature("g", left, "ragged", BAGS, invalid_ids="error"),
            ),
            shows=("ids are clamped", "one step a feature"),
        ),
        Case(
            "where_no_error_can_be_raised_ids_are_dropped",
            "adagrad",
            (left,),
            (feature("f", left, "dense", INVALID_GRID, invalid_ids="error"),),
            shows=("ids are clamped", "ids wrap"),
            only_compiled=True,
            **on_default_device("a SparseCore's host raises the error"),
        ),
    ]
    return cases
