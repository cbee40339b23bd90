"""Every rule of the layer as cases: small tables, eight rows, three steps.

To add a case, add a `Case` to the list of its section. Take the layer whose
optimizer shows the rule best:

* "sgd" shows sums of gradients as they are;
* "adagrad" also tells one step on a sum from several steps;
* "adam" also tells touched rows from others, and counts steps;
* "batches" has batches of 8, 3 and 0 rows and stacks no tables.

The sections stand in modules of their own, in the order of the rules. All
cases of a layer run together, in one traced step a backend, so a case
costs no trace of its own. `shows` names the ways of breaking a rule
(`breaks.BREAKS`) that the case would notice; the suite checks that it
does. Every backend picks the case up by itself.
"""

from __future__ import annotations

import dataclasses

from tests.conformance.cases import (
    BATCH,
    DEFAULT_DEVICE,
    SPARSECORE,
    STEPS,
    Case,
    Layer,
    Table,
)
from tests.conformance.registry.data import SHORT_BATCHES
from tests.conformance.registry.empty import cases_of_empties
from tests.conformance.registry.formulas import cases_of_formulas
from tests.conformance.registry.ids import cases_of_ids
from tests.conformance.registry.kinds import cases_of_kinds
from tests.conformance.registry.optimizers import NAMES, OPTIMIZERS
from tests.conformance.registry.shapes import cases_of_shapes
from tests.conformance.registry.updates import cases_of_updates
from tests.conformance.registry.weights import cases_of_weights

#: Layer -> (usual optimizer of its tables, rows of each step, settings).
LAYERS: dict[str, tuple[str, tuple[int, ...], dict[str, object]]] = {
    "sgd": ("sgd", (BATCH,) * STEPS, {}),
    "adagrad": ("adagrad", (BATCH,) * STEPS, {}),
    "adam": ("adam", (BATCH,) * STEPS, {}),
    "batches": ("adam", SHORT_BATCHES, {"table_stacking": None}),
    "momentum": ("momentum", (BATCH,) * STEPS, {}),
    "ftrl": ("ftrl", (BATCH,) * STEPS, {}),
    "native": ("native sgd", (BATCH,) * STEPS, {}),
    "model": ("model", (BATCH,) * STEPS, {}),
}


def _prefixed(case: Case) -> Case:
    """Names that are unique among the cases of a layer."""
    tables = tuple(
        dataclasses.replace(t, name=f"{case.name}__{t.name}", code=_code(t))
        for t in case.tables
    )
    features = tuple(
        dataclasses.replace(
            f, name=f"{case.name}__{f.name}", table=f"{case.name}__{f.table}"
        )
        for f in case.features
    )
    return dataclasses.replace(case, tables=tables, features=features)


def _code(table: Table) -> int:
    """The code it has by its short name, so that prefixing changes none."""
    if table.code is not None:
        return table.code
    return sum(map(ord, table.name)) % 13


CASES: tuple[Case, ...] = tuple(
    _prefixed(case)
    for case in (
        *cases_of_kinds(),
        *cases_of_ids(),
        *cases_of_shapes(),
        *cases_of_weights(),
        *cases_of_empties(),
        *cases_of_updates(),
        *cases_of_formulas(),
    )
)


def _on_sparsecores(case: Case) -> Case:
    """The case where no gradient reaches the weights.

    Nor can a TPU's host put ids and weights together: what is not a part of a
    ragged or sparse tensor, TPUStrategy fills up.
    """
    features = tuple(
        dataclasses.replace(
            f,
            weights_gradient=False,
            weights_apart=f.weights is not None,
        )
        for f in case.features
    )
    return dataclasses.replace(case, features=features)


def layer_of(
    name: str,
    *,
    dense_only: bool = False,
    compiled: bool = False,
    family: str = DEFAULT_DEVICE,
) -> Layer:
    """The cases of one layer that a backend runs, merged.

    Args:
        name: key of LAYERS.
        dense_only: leave out cases with ragged or sparse inputs.
        compiled: include the cases that hold only under XLA.
        family: "default_device" or "sparsecore".
    """
    optimizer, batches, settings = LAYERS[name]
    cases = tuple(
        _on_sparsecores(case) if family == SPARSECORE else case
        for case in CASES
        if case.layer == name
        and family in case.backends
        and (case.dense or not dense_only)
        and (compiled or not case.only_compiled)
    )
    return Layer(name, cases, batches, settings, OPTIMIZERS[optimizer])


__all__ = ["CASES", "LAYERS", "NAMES", "OPTIMIZERS", "layer_of"]
