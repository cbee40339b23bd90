"""Section "Updates": the formula of each optimizer."""

from __future__ import annotations

from tests.conformance.cases import Case, Table
from tests.conformance.registry.data import (
    BAGS,
    GRID,
    SINGLE,
    feature,
    on_default_device,
)
from tests.conformance.registry.optimizers import OPTIMIZERS


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
    return cases
