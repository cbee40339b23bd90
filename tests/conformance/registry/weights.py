"""Section "Weights": types, zero sums, gradients to weights."""

from __future__ import annotations

from tests.conformance.cases import BATCH, Case, Table
from tests.conformance.registry.data import (
    BAGS,
    COMBINERS,
    GRID,
    GRID_WEIGHTS,
    INVALID,
    INVALID_GRID,
    INVALID_WEIGHTS,
    KINDS,
    WEIGHTS,
    feature,
    on_default_device,
    rows_for,
)

_NO_WEIGHTS_GRADIENT = (
    "design 5.2: on SparseCore no gradient reaches the weights"
)


#: Every type once; each kind has an integer and a float one.
WEIGHTS_TYPES = {
    "dense": ("int32", "float64"),
    "ragged": (
        "int8", "uint8", "int32", "int64", "float16", "bfloat16", "float64"
    ),
    "sparse": ("int64", "float16"),
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
        kinds = [Table(f"{kind}", 12, 4, combiner, code=4) for kind in KINDS]
        through = (
            ()
            if combiner == "sum"
            else ("no gradient through the denominator",)
        )
        cases += [
            Case(
                f"gradient_to_weights_{combiner}",
                "sgd",
                tuple(kinds),
                tuple(
                    feature(
                        f"f_{t.name}",
                        t,
                        t.name,
                        *rows_for(t.name),
                        order="reversed",
                        weights_gradient=True,
                    )
                    for t in kinds
                ),
                shows=(
                    *through,
                    *(
                        ("weights' gradient despite a zero denominator",)
                        if combiner != "sum"
                        else ("weights are ignored",)
                    ),
                ),
                **on_default_device(_NO_WEIGHTS_GRADIENT),
            ),
            Case(
                f"gradient_to_dense_weights_{combiner}",
                "sgd",
                (kinds[0],),
                (
                    feature(
                        "f",
                        kinds[0],
                        "dense",
                        GRID,
                        GRID_WEIGHTS,
                        weights_gradient=True,
                    ),
                    feature(
                        "unreduced",
                        kinds[0],
                        "dense",
                        GRID,
                        GRID_WEIGHTS,
                        weights_gradient=True,
                        output_shape=(BATCH, 3, 4),
                    ),
                ),
                shows=through or ("weights are ignored",),
                **on_default_device(_NO_WEIGHTS_GRADIENT),
            ),
        ]

    kinds = [Table(kind, 12, 4, "mean", code=4) for kind in KINDS]
    cases.append(
        Case(
            "gradient_to_weights_of_cut_and_dropped_ids",
            "sgd",
            tuple(kinds),
            tuple(
                feature(
                    f"f_{t.name}",
                    t,
                    t.name,
                    INVALID_GRID if t.name == "dense" else INVALID,
                    GRID_WEIGHTS if t.name == "dense" else INVALID_WEIGHTS,
                    order="shuffled",
                    weights_gradient=True,
                    invalid_ids="drop",
                    input_shape=(BATCH, 3 if t.name == "dense" else 2),
                )
                for t in kinds
            ),
            shows=(
                "ids are clamped",
                "weights are not dropped alongside",
                "the cut comes before the drop",
            ),
            **on_default_device(_NO_WEIGHTS_GRADIENT),
        )
    )
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
