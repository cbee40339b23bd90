"""Section "Kinds": cut bags and outputs that are not reduced."""

from __future__ import annotations

from tests.conformance.cases import BATCH, Case, Table
from tests.conformance.registry.data import (
    COMBINERS,
    GRID,
    KINDS,
    LONG,
    LONG_WEIGHTS,
    combiners_for,
    feature,
    rows_for,
)


def cases_of_shapes() -> list[Case]:
    """The cases of this section."""
    cases = []
    for kind in ("ragged", "sparse"):
        mean = Table("mean", 12, 4, "mean")
        tables = [Table(name, 12, 4, name) for name in combiners_for(kind)]
        cases += [
            Case(
                f"{kind}_rows_are_cut_before_the_denominator",
                "adagrad",
                (mean,),
                (feature("f", mean, kind, LONG, input_shape=(None, 3)),),
                shows=(
                    "bags are not cut",
                    "bags are cut after the denominator",
                    *(
                        ("bags are cut by the sparse column",)
                        if kind == "sparse"
                        else ()
                    ),
                ),
            ),
            Case(
                f"{kind}_weights_are_cut_alongside",
                "adagrad",
                tuple(tables),
                tuple(
                    feature(
                        f"f_{t.name}",
                        t,
                        kind,
                        LONG,
                        LONG_WEIGHTS,
                        weights_gradient=True,
                        input_shape=(BATCH, 3),
                    )
                    for t in tables
                ),
                shows=(
                    "weights are not cut alongside",
                    "bags are cut after the denominator",
                ),
            ),
            Case(
                f"{kind}_ids_beyond_the_cut_touch_nothing",
                "adam",
                tuple(tables[:1]),
                (feature("f", tables[0], kind, LONG, input_shape=(BATCH, 3)),),
                shows=("bags are not cut", "ids beyond the cut touch rows"),
            ),
        ]
    for kind in KINDS:
        rows, weights = rows_for(kind)
        if kind != "dense":
            rows, weights = LONG, LONG_WEIGHTS
        # Dense is compiled by XLA too, by other code than is otherwise run.
        combiners = COMBINERS if kind == "dense" else combiners_for(kind)
        tables = [Table(combiner, 12, 4, combiner) for combiner in combiners]
        cases += [
            Case(
                f"{kind}_unreduced",
                "adagrad",
                (tables[0],),
                (
                    feature(
                        "f", tables[0], kind, rows, output_shape=(None, 3, 4)
                    ),
                ),
                shows=(
                    "one step an occurrence",
                    *(("gaps stay",) if kind == "sparse" else ()),
                ),
            ),
            Case(
                f"{kind}_unreduced_weights_follow_the_formulas",
                "adagrad",
                tuple(tables),
                tuple(
                    feature(
                        f"f_{t.name}",
                        t,
                        kind,
                        rows,
                        weights,
                        weights_gradient=True,
                        input_shape=(BATCH, 3),
                        output_shape=(BATCH, 3, 4),
                    )
                    for t in tables
                ),
                shows=(
                    "a bag of one is its row",
                    "a bag of one is weighted",
                ),
            ),
        ]
    wide, narrow = Table("wide", 12, 4), Table("narrow", 12, 4)
    cases += [
        Case(
            "dense_unreduced_fills_with_zeros_and_cuts",
            "adam",
            (wide, narrow),
            (
                feature("f", wide, "dense", GRID, output_shape=(BATCH, 5, 4)),
                feature("g", narrow, "dense", GRID, output_shape=(BATCH, 2, 4)),
            ),
            shows=("ids beyond the cut touch rows",),
        ),
        Case(
            "unreduced_fills_with_zeros_and_cuts",
            "adam",
            (wide, narrow),
            (
                feature("f", wide, "ragged", LONG, output_shape=(BATCH, 9, 4)),
                feature(
                    "g", narrow, "ragged", LONG, output_shape=(BATCH, 1, 4)
                ),
            ),
            shows=("ids beyond the cut touch rows",),
        ),
    ]
    return cases
