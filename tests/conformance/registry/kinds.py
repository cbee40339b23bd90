"""Section "Kinds": dense, ragged and sparse inputs."""

from __future__ import annotations

import itertools

from tests.conformance.cases import BATCH, Case, Feature, Table
from tests.conformance.registry.data import (
    BAGS,
    COMBINERS,
    GRID,
    GRID_WEIGHTS,
    KINDS,
    LONG,
    LONG_WEIGHTS,
    SINGLE,
    SINGLE_WEIGHTS,
    WEIGHTS,
    feature,
    rows_for,
)

_OF_DENOMINATOR = {
    "sum": (),
    "mean": (
        "mean over the count",
        "mean over absolute weights",
        "no gradient through the denominator",
        "weights' gradient despite a zero denominator",
    ),
    "sqrtn": (
        "sqrtn over the root of the count",
        "sqrtn over the root of the sum",
        "no gradient through the denominator",
    ),
}


def cases_of_kinds() -> list[Case]:
    """The cases of this section."""
    cases = []
    for combiner, kind in itertools.product(COMBINERS, KINDS):
        table = Table("t", 12, 4, combiner)
        rows, weights = rows_for(kind)
        empty = (
            ()
            if kind == "dense"
            else ("an empty row reads row 0", "an empty last row is not there")
        )
        cases += [
            Case(
                f"{kind}_{combiner}",
                "sgd",
                (table,),
                (feature("f", table, kind, rows),),
                shows=("weights of none are zero", *empty),
            ),
            Case(
                f"{kind}_{combiner}_weighted",
                "sgd",
                (table,),
                (
                    feature(
                        "f",
                        table,
                        kind,
                        rows,
                        weights,
                        order="reversed",
                        weights_gradient=True,
                    ),
                ),
                shows=(
                    "weights are ignored",
                    "negative weights are clamped",
                    *_OF_DENOMINATOR[combiner],
                ),
            ),
        ]

    tables = [Table(kind, 12, 5, "mean", code=1) for kind in KINDS]
    one, column = (Table(name, 12, 3, "mean", code=2) for name in ("c", "d"))
    cases += [
        Case(
            "same_data_of_any_kind",
            "adagrad",
            tuple(tables),
            tuple(
                feature(
                    f"f_{t.name}",
                    t,
                    t.name,
                    GRID,
                    GRID_WEIGHTS,
                    weights_apart=True,
                )
                for t in tables
            ),
            shows=("weights are ignored", "one step an occurrence"),
        ),
        Case(
            "rank_one_is_one_column",
            "adagrad",
            (one, column),
            (
                feature("f", one, "dense", SINGLE, rank=1),
                feature("g", column, "dense", SINGLE),
            ),
            shows=("one step an occurrence",),
        ),
    ]
    tables = [Table(name, 12, 3, name) for name in COMBINERS]
    cases.append(
        Case(
            "bag_of_one_follows_the_formula",
            "adagrad",
            tuple(tables),
            tuple(
                feature(
                    f"f_{t.name}", t, "dense", SINGLE, SINGLE_WEIGHTS, rank=1
                )
                for t in tables
            ),
            shows=("a bag of one is its row", "a bag of one is weighted"),
        )
    )
    cases.append(
        Case(
            "ragged_bag_of_one_follows_the_formula",
            "adagrad",
            (tables[2],),
            (feature("f", tables[2], "ragged", SINGLE, SINGLE_WEIGHTS),),
            shows=("a bag of one is its row", "a bag of one is weighted"),
        )
    )

    a, b, c = (Table(name, 12, 4, "mean") for name in "abc")
    cases += [
        Case(
            "unsorted_sparse",
            "adagrad",
            (a, b),
            (
                feature(
                    "f",
                    a,
                    "sparse",
                    BAGS,
                    WEIGHTS,
                    order="reversed",
                    weights_apart=True,
                ),
                feature("g", b, "sparse", BAGS, order="shuffled"),
            ),
            shows=("one step an occurrence", "weights are ignored"),
        ),
        Case(
            "unsorted_sparse_is_cut_in_column_order",
            "adagrad",
            (a, b),
            (
                feature(
                    "f",
                    a,
                    "sparse",
                    LONG,
                    LONG_WEIGHTS,
                    order="reversed",
                    input_shape=(BATCH, 3),
                ),
                feature(
                    "g",
                    b,
                    "sparse",
                    LONG,
                    order="shuffled",
                    output_shape=(BATCH, 3, 4),
                ),
            ),
            shows=("sparse ids in the order fed",),
        ),
        Case(
            "several_ids_in_a_cell",
            "adagrad",
            (a, b, c),
            tuple(
                Feature(
                    name,
                    table.name,
                    "sparse",
                    (
                        [(0, 2, 3), (0, 2, 5), (3, 0, 1), (0, 2, 3)],
                        [(7, 0, 1), (7, 0, 2), (2, 9, 4), (2, 1, 6)],
                        [(1, 1, 3), (0, 4, 7), (1, 1, 9), (0, 4, 8)],
                    ),
                    weights,
                    **options,
                )
                for name, table, weights, options in (
                    ("f", a, None, {}),
                    (
                        "weighted",
                        b,
                        ([1, 2, 0.5, 3], [1, -2, 1, 4], [2, 1, 1, 0.25]),
                        {},
                    ),
                    ("unreduced", c, None, {"output_shape": (BATCH, 2, 4)}),
                )
            ),
            shows=("the last id of a cell wins", "one step an occurrence"),
        ),
        Case(
            "dense_shape_does_not_matter",
            "adagrad",
            (a,),
            (feature("f", a, "sparse", BAGS, WEIGHTS, columns=2**40),),
            shows=("weights are ignored",),
        ),
        Case(
            "sparse_columns_far_apart",
            "adagrad",
            (a, b),
            (
                Feature(
                    "f",
                    a.name,
                    "sparse",
                    (
                        [(0, 5, 3), (0, 2**39, 3), (6, 2**33, 1)],
                        [(1, 2**39, 2), (1, 2**33, 4), (1, 0, 6)],
                        [(0, 2**32, 8), (0, 2**31, 9), (0, 7, 3)],
                    ),
                    columns=2**40,
                    input_shape=(BATCH, 2),
                ),
                Feature(
                    "g",
                    b.name,
                    "sparse",
                    (
                        [(0, 5, 3), (0, 2**39, 3), (6, 2**33, 1)],
                        [(1, 2**39, 2), (1, 2**33, 4), (1, 0, 6)],
                        [(0, 2**32, 8), (0, 2**31, 9), (0, 7, 3)],
                    ),
                    columns=2**40,
                    output_shape=(BATCH, 2, 4),
                ),
            ),
            shows=("bags are cut by the sparse column", "gaps stay"),
        ),
        Case(
            "row_splits_of_int32",
            "adagrad",
            (a,),
            (
                feature(
                    "f",
                    a,
                    "ragged",
                    BAGS,
                    WEIGHTS,
                    row_splits_dtype="int32",
                    weights_apart=True,
                ),
            ),
            shows=("weights are ignored",),
        ),
    ]
    return cases
