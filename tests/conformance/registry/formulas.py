"""Section "Updates": the formula of each optimizer."""

from __future__ import annotations

from typing import Any

from tests.conformance.cases import BATCH, Case, Feature, Table
from tests.conformance.registry.data import (
    BAGS,
    GRID,
    GRID_WEIGHTS,
    INVALID_GRID,
    SINGLE,
    WEIGHTS,
    feature,
    on_default_device,
)
from tests.conformance.registry.optimizers import OPTIMIZERS


def _touched_by_weight_zero(layer: str, optimizer: str, **options: Any) -> Case:
    """Rows that take a step with gradient 0: late, and as their first one.

    Dense, so that XLA compiles it too.
    """
    table = Table("t", 12, 4, "sum", optimizer)
    ids = (
        [[3], [2], *[[5]] * 6],
        [[3], [2], *[[7]] * 6],
        [[0], [3], *[[5]] * 6],
    )
    weights = (
        [[1.0], [2.0], *[[0.5]] * 6],
        [[0.0], [1.0], *[[0.5]] * 6],
        [[0.0], [1.0], *[[0.0]] * 6],
    )
    return Case(
        f"{optimizer.replace(' ', '_')}_touched_by_weight_zero",
        layer,
        (table,),
        (Feature("f", "t", "dense", ids, weights),),
        shows=("weight 0 does not touch", "gradient 0 does not touch"),
        **options,
    )


def cases_of_formulas() -> list[Case]:
    """Each optimizer on ragged and on dense input."""
    a = Table("a", 12, 4)
    cases = []

    def by(name, layer, optimizer, shows, **options) -> Case:
        """Dense, so that XLA compiles it too."""
        single = Table("single", 12, 4, "mean", optimizer)
        grid = Table("grid", 12, 4, "mean", optimizer)
        return Case(
            name,
            layer,
            (single, grid),
            (
                # Five rows a step, other ones the next.
                feature("f", single, "dense", SINGLE, rank=1),
                feature("g", grid, "dense", GRID),
            ),
            shows=("one step an occurrence", *shows)
            if OPTIMIZERS[optimizer].rule != "sgd"
            else shows,
            **options,
        )

    momentum = on_default_device("design 5.6: momentum raises on SparseCore")
    shrinkage = on_default_device("design 5: TPU optimizers have no shrinkage")
    lazy = "all rows are touched"
    cases += [
        by("sgd_by_name", "sgd", "sgd by name", ("the rate is ignored",)),
        by(
            "sgd_with_a_schedule",
            "sgd",
            "sgd with a schedule",
            ("the schedule stands still", "the schedule starts at 1"),
        ),
        by("adagrad", "adagrad", "adagrad", ("Adagrad's epsilon outside",)),
        by("adagrad_by_name", "adagrad", "adagrad by name", ()),
        by("adam", "adam", "adam", (lazy, "Adam's epsilon inside")),
        by("adam_by_name", "adam", "adam by name", ("no bias correction",)),
        by(
            "adam_with_a_schedule",
            "adam",
            "adam with a schedule",
            ("the schedule stands still", "the schedule starts at 1"),
        ),
        by(
            "momentum",
            "momentum",
            "momentum",
            (lazy, "momentum holds the bare gradient"),
            **momentum,
        ),
        by(
            "nesterov",
            "momentum",
            "nesterov",
            (lazy, "nesterov is plain momentum"),
            **momentum,
        ),
        by(
            "ftrl",
            "ftrl",
            "ftrl",
            ("FTRL without l1", "FTRL without l2", "FTRL without beta"),
        ),
        by(
            "ftrl_with_shrinkage",
            "ftrl",
            "ftrl with shrinkage",
            ("FTRL without shrinkage", "FTRL's power is a half"),
            **shrinkage,
        ),
        by("native_sgd", "native", "native sgd", ("the rate is ignored",)),
        by("native_adagrad", "native", "native adagrad", ()),
        by(
            "native_adagrad_momentum",
            "native",
            "native adagrad momentum",
            (lazy, "AdagradMomentum without beta2"),
        ),
        by(
            "native_adagrad_nesterov",
            "native",
            "native adagrad nesterov",
            (
                lazy,
                "AdagradMomentum without nesterov",
                "AdagradMomentum's exponent is two",
                "AdagradMomentum without epsilon",
            ),
        ),
        by(
            "native_adam",
            "native",
            "native adam",
            (lazy, "native Adam corrects the bias", "the sum is outside"),
        ),
        by(
            "native_adam_sum_outside",
            "native",
            "native adam, sum outside",
            (lazy, "native Adam corrects the bias", "the sum is inside"),
        ),
        by(
            "native_ftrl",
            "native",
            "native ftrl",
            ("FTRL without l1", "FTRL without l2", "FTRL without beta"),
        ),
        by(
            "native_ftrl_scaled",
            "native",
            "native ftrl, scaled",
            ("FTRL's linear slot is not scaled",),
        ),
        by(
            "trained_by_the_model",
            "model",
            "model",
            (),
            **on_default_device(
                "design 5.6: tables without an own optimizer raise"
            ),
        ),
    ]
    cases += [
        _touched_by_weight_zero("adam", "adam"),
        _touched_by_weight_zero("momentum", "momentum", **momentum),
        _touched_by_weight_zero("ftrl", "ftrl"),
        _touched_by_weight_zero("native", "native adam"),
        _touched_by_weight_zero("native", "native adagrad momentum"),
        _touched_by_weight_zero("native", "native ftrl"),
    ]
    scheduled = Table("t", 12, 4, "sum", "sgd with a schedule")
    cases.append(
        Case(
            "schedule_advances_without_an_id_of_the_table",
            "sgd",
            (scheduled, a),
            (
                Feature(
                    "f",
                    "t",
                    "dense",
                    ([[-1]] * BATCH, [[3]] * BATCH, [[4]] * BATCH),
                    invalid_ids="drop",
                ),
                feature("g", a, "dense", GRID),
            ),
            shows=(
                "t counts the steps with an id of the table",
                "the schedule stands still",
            ),
        )
    )
    mean = Table("mean", 12, 4, "mean")
    cases.append(
        Case(
            "any_kind_trained_by_the_model",
            "model",
            (mean,),
            (
                feature("ragged", mean, "ragged", BAGS, WEIGHTS),
                feature("sparse", mean, "sparse", BAGS, order="shuffled"),
                feature(
                    "dense",
                    mean,
                    "dense",
                    INVALID_GRID,
                    GRID_WEIGHTS,
                    invalid_ids="drop",
                ),
            ),
            shows=(
                "one step a feature",
                "one step an occurrence",
                "ids are clamped",
            ),
            **on_default_device(
                "design 5.6: tables without an own optimizer raise"
            ),
        )
    )
    frozen = Table("frozen", 12, 4, "mean", trainable=False)
    cases.append(
        Case(
            "frozen_table",
            "sgd",
            (frozen, a),
            (
                feature("f", frozen, "ragged", BAGS),
                feature("g", a, "ragged", BAGS),
            ),
            shows=("frozen tables train",),
        )
    )
    cases.append(
        Case(
            "frozen_table_of_dense_input",
            "adam",
            (frozen,),
            (feature("f", frozen, "dense", GRID, GRID_WEIGHTS),),
            shows=("frozen tables train",),
        )
    )
    return cases
