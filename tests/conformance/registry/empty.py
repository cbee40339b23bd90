"""Section "Empty": rows and batches without ids."""

from __future__ import annotations

from tests.conformance.cases import BATCH, Case, Table
from tests.conformance.registry.data import (
    COMBINERS,
    KINDS,
    SHORT_BATCHES,
    SINGLE,
    SINGLE_WEIGHTS,
    Rows,
    combiners_for,
    feature,
    rows_for,
)


def cases_of_empties() -> list[Case]:
    """The cases of this section."""
    nothing: Rows = [[]] * BATCH
    tables = [Table(f"t_{c}", 12, 4, c) for c in COMBINERS]
    batches = SHORT_BATCHES
    cases = []
    for kind in ("ragged", "sparse"):
        cases += [
            Case(
                f"{kind}_rows_empty_anywhere",
                "adagrad",
                tuple(t for t in tables if t.combiner in combiners_for(kind)),
                tuple(
                    feature(
                        f"f_{t.combiner}",
                        t,
                        kind,
                        [[], [1, 1], [], [], [4], [2, 3], [], []],
                    )
                    for t in tables
                    if t.combiner in combiners_for(kind)
                ),
                shows=(
                    "an empty row reads row 0",
                    "an empty last row is not there",
                ),
            ),
            Case(
                f"{kind}_all_rows_empty",
                "adam",
                tuple(tables),
                (
                    feature("f", tables[0], kind, nothing),
                    feature("weighted", tables[1], kind, nothing, nothing),
                    feature(
                        "unreduced",
                        tables[2],
                        kind,
                        nothing,
                        output_shape=(BATCH, 2, 4),
                    ),
                ),
                shows=(
                    "an empty row reads row 0",
                    "t counts the steps with an id of the table",
                ),
            ),
        ]
    for kind in KINDS:
        rows, weights = rows_for(kind)
        cases.append(
            Case(
                f"{kind}_short_and_empty_batch",
                "batches",
                tuple(tables),
                (
                    feature("f", tables[0], kind, rows, batches=batches),
                    feature(
                        "weighted",
                        tables[1],
                        kind,
                        rows,
                        weights,
                        batches=batches,
                        weights_apart=True,
                        input_shape=(BATCH, 4 if kind != "dense" else 3),
                    ),
                    feature(
                        "unreduced",
                        tables[2],
                        kind,
                        rows,
                        weights,
                        batches=batches,
                        output_shape=(BATCH, 3, 4),
                    ),
                ),
                batches=batches,
                shows=(
                    "one step an occurrence",
                    "all rows are touched",
                    "t counts the steps with an id of the table",
                ),
            )
        )
    single = Table("single", 12, 4, "mean")
    cases.append(
        Case(
            "rank_one_short_and_empty_batch",
            "batches",
            (single,),
            (
                feature(
                    "f",
                    single,
                    "dense",
                    SINGLE,
                    SINGLE_WEIGHTS,
                    rank=1,
                    batches=batches,
                    input_shape=(BATCH,),
                    output_shape=(BATCH, 4),
                ),
            ),
            batches=batches,
            shows=("one step an occurrence", "all rows are touched"),
        )
    )
    return cases
