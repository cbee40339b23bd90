"""Section "Weights": types and zero sums."""

from __future__ import annotations

from tests.conformance.cases import Case, Table
from tests.conformance.registry.data import (
    BAGS,
    COMBINERS,
    GRID,
    GRID_WEIGHTS,
    KINDS,
    WEIGHTS,
    feature,
    rows_for,
)

#: Every type once with ragged ids; the cast is the same for all kinds.
WEIGHTS_TYPES = {
    "dense": ("int32",),
    "ragged": (
        "int8", "uint8", "int32", "int64", "float16", "bfloat16", "float64"
    ),
    "sparse": ("float64",),
}  # fmt: skip


def cases_of_weights() -> list[Case]:
    """The cases of this section."""
    cases = []
    zero_sum = [
        [1.0, -2.0, 1.0], [3.0], [], [1.0, 0.5, -0.5, -1.0], [0.0, 0.0], [],
        [2.0, -2.0], [],
    ]  # fmt: skip
    for combiner in COMBINERS:
        table = Table("t", 12, 4, combiner)
        cases += [
            Case(
                f"weights_with_sum_zero_{combiner}",
                "sgd",
                (table,),
                (feature("f", table, "ragged", BAGS, zero_sum),),
                shows={
                    "sum": ("weights are ignored",),
                    "mean": ("a zero denominator leaves the sum",),
                    "sqrtn": ("negative weights are clamped",),
                }[combiner],
            )
        ]
    table = Table("t", 12, 4, "mean")
    for kind in KINDS:
        rows, weights = rows_for(kind)
        features = []
        for dtype in WEIGHTS_TYPES[kind]:
            values = weights
            if "int" in dtype:
                values = [[int(3 * w) for w in row] for row in weights]
            if "uint" in dtype:
                values = [[abs(w) for w in row] for row in values]
            features.append(
                feature(dtype, table, kind, rows, values, weights_dtype=dtype)
            )
        cases.append(
            Case(
                f"{kind}_weights_of_every_type",
                "adagrad",
                (table,),
                tuple(features),
                shows=("weights are ignored", "mean over the count"),
            )
        )
    cases.append(
        Case(
            "weights_for_some_features_only",
            "adagrad",
            (table,),
            (
                feature(
                    "weighted",
                    table,
                    "ragged",
                    BAGS,
                    WEIGHTS,
                    weights_apart=True,
                ),
                feature("f", table, "ragged", BAGS),
                feature("g", table, "dense", GRID, GRID_WEIGHTS),
                feature("h", table, "dense", GRID),
            ),
            shows=("weights are ignored", "one step a feature"),
        )
    )
    return cases
