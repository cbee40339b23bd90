"""Section "Updates": what is summed, what is touched, what t counts."""

from __future__ import annotations

from tests.conformance.cases import BATCH, STEPS, Case, Feature, Table
from tests.conformance.registry.data import (
    BAGS,
    GRID,
    GRID_WEIGHTS,
    POSITIVE,
    SINGLE,
    WEIGHTS,
    Rows,
    feature,
)


def cases_of_updates() -> list[Case]:
    """The cases of this section."""
    a, b, c = (Table(name, 12, 4) for name in "abc")
    mean = Table("mean", 12, 4, "mean")
    unseen: Rows = [[]] * BATCH
    cases = [
        Case(
            "repeated_ids_in_a_bag",
            "adagrad",
            (a,),
            (
                feature(
                    "f",
                    a,
                    "ragged",
                    [[3, 3, 3], [5, 5], [1, 0, 1], [], [7], [], [2, 2], []],
                ),
            ),
            shows=("one step an occurrence",),
        ),
        Case(
            "repeated_ids_across_bags",
            "adagrad",
            (a,),
            (
                feature(
                    "f", a, "dense", [[3], [3], [1], [3], [1], [3], [0], [3]]
                ),
            ),
            shows=("one step an occurrence", "one step a bag"),
        ),
        Case(
            "repeated_ids_across_replicas",
            "adam",
            (a, mean),
            (
                feature("f", a, "dense", [[3, 4]] * BATCH),
                feature("g", mean, "ragged", [[6, 2]] * BATCH),
            ),
            shows=("one step a replica",),
        ),
        Case(
            "ids_of_one_replica_only",
            "adam",
            (a, mean),
            (
                feature("f", a, "ragged", [[3, 4], [4], [1], *[[]] * 5]),
                feature("g", mean, "ragged", [*[[]] * 5, [3, 4], [4], [1]]),
            ),
            shows=("all rows are touched",),
        ),
        Case(
            "features_share_a_table",
            "adagrad",
            (mean,),
            (
                feature("ragged", mean, "ragged", BAGS, WEIGHTS),
                feature("sparse", mean, "sparse", BAGS, order="shuffled"),
                feature("dense", mean, "dense", GRID),
                feature("one", mean, "dense", SINGLE, rank=1),
                feature(
                    "unreduced",
                    mean,
                    "ragged",
                    BAGS,
                    output_shape=(BATCH, 2, 4),
                ),
            ),
            shows=("one step a feature", "one step an occurrence"),
        ),
        Case(
            "dense_features_share_a_table",
            "adam",
            (mean,),
            (
                feature("f", mean, "dense", GRID, GRID_WEIGHTS),
                feature("g", mean, "dense", SINGLE, rank=1),
            ),
            shows=("one step a feature", "one step an occurrence"),
        ),
        Case(
            "tables_of_many_widths",
            "adagrad",
            tuple(
                Table(f"t_{dim}", 7 + dim, dim, "sqrtn")
                for dim in (1, 3, 8, 17)
            ),
            tuple(
                feature(
                    f"f_{dim}",
                    Table(f"t_{dim}", 7 + dim, dim, "sqrtn"),
                    "ragged",
                    [[i % (7 + dim) for i in row] for row in BAGS],
                    WEIGHTS,
                )
                for dim in (1, 3, 8, 17)
            ),
            shows=("one step an occurrence", "weights are ignored"),
        ),
        Case(
            "table_of_one_row",
            "adam",
            (Table("t", 1, 4, "mean"),),
            (
                feature(
                    "f",
                    Table("t", 1, 4, "mean"),
                    "ragged",
                    [[0] * len(row) for row in BAGS],
                    POSITIVE,
                ),
            ),
            shows=("one step an occurrence",),
        ),
        Case(
            "untouched_rows_do_not_move",
            "adam",
            (a, b),
            (feature("f", a, "ragged", BAGS), feature("g", b, "dense", GRID)),
            shows=("all rows are touched", "no bias correction"),
        ),
        Case(
            "weight_zero_touches",
            "adam",
            (a, mean),
            tuple(
                Feature(
                    f"f_{t.name}",
                    t.name,
                    "ragged",
                    # Row 3 has a moment after step 0, then only weight 0.
                    (
                        [[3, 1], [2], *[[]] * 6],
                        [[3], [3, 1], *[[]] * 6],
                        [[], [3, 0], *[[]] * 6],
                    ),
                    (
                        [[1.0, 2.0], [1.0], *[[]] * 6],
                        [[0.0], [0.0, 1.0], *[[]] * 6],
                        [[], [0.0, 0.0], *[[]] * 6],
                    ),
                )
                for t in (a, mean)
            ),
            shows=("weight 0 does not touch", "gradient 0 does not touch"),
        ),
        Case(
            "feature_without_gradient_touches",
            "adam",
            (a,),
            (
                feature("f", a, "ragged", BAGS),
                feature("g", a, "dense", GRID, in_loss=False),
            ),
            shows=("features without gradient do not touch",),
        ),
        Case(
            "table_without_gradient_is_touched",
            "adam",
            (b, mean, Table("wide", 12, 6)),
            # Tables that stack with others, and one of a width of its own.
            tuple(
                Feature(
                    f"f_{name}",
                    name,
                    "dense",
                    tuple([[step]] * BATCH for step in range(STEPS)),
                    in_loss=name == "b",
                )
                for name in ("b", "mean", "wide")
            ),
            shows=("t counts the steps with a gradient of the table",),
        ),
        Case(
            "table_not_in_the_batch_counts_the_step",
            "adam",
            (a, Table("wide", 12, 5)),
            tuple(
                Feature(
                    f"f_{t}",
                    t,
                    "ragged",
                    (unseen, [[3, 1], *[[]] * 7], [[3], *[[]] * 7]),
                )
                for t in ("a", "wide")
            ),
            shows=("t counts the steps with an id of the table",),
        ),
        Case(
            "all_ids_dropped_counts_the_step",
            "adam",
            (a,),
            (
                Feature(
                    "f",
                    "a",
                    "dense",
                    ([[-1]] * BATCH, [[3]] * BATCH, [[3]] * BATCH),
                    invalid_ids="drop",
                ),
            ),
            shows=("t counts the steps with an id of the table",),
        ),
        Case(
            "one_feature_of_a_table_absent_in_a_step",
            "adagrad",
            (c,),
            (
                Feature("f", "c", "ragged", (BAGS, unseen, BAGS)),
                Feature("g", "c", "ragged", (unseen, BAGS, BAGS)),
            ),
            shows=("one step a feature", "one step an occurrence"),
        ),
    ]

    return cases
