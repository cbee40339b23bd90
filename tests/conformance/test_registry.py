"""Every case of the registry, on every backend, against the reference."""

from __future__ import annotations

import pytest

from tests.conformance.comparison import mismatches
from tests.conformance.reference import Reference
from tests.conformance.registry import CASES, LAYERS, OPTIMIZERS
from tests.conformance.runners import BACKENDS

RUNS = [
    pytest.param(backend, case, id=f"{backend}-{layer}-{case.name}")
    for backend in BACKENDS
    for layer in BACKENDS[backend].layers
    for case in BACKENDS[backend].layer(layer).cases
]


@pytest.mark.parametrize("backend, case", RUNS)
def test_case_equals_the_reference(backend, case, run_of):
    optimizer, _, _ = LAYERS[case.layer]
    expected = Reference(OPTIMIZERS).run(case, optimizer)
    wrong = mismatches(run_of(backend, case.layer), expected)
    assert not wrong, "\n".join(
        [f"{case.name} on {backend}, layer '{case.layer}':", *wrong]
    )


def test_every_case_runs_somewhere():
    run = {param.values[1].name for param in RUNS}
    assert run == {case.name for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_is_left_out_only_for_a_reason(case):
    assert len(case.backends) == 2 or case.reason


def test_weights_come_apart_in_every_kind():
    features = [f for case in CASES for f in case.features]
    apart = {f.kind for f in features if f.weights_apart}
    assert apart == {"dense", "ragged", "sparse"}
    # The tape watches flat values.
    assert not any(f.weights_apart and f.weights_gradient for f in features)


def test_names_are_unique():
    for names in (
        [case.name for case in CASES],
        [table.name for case in CASES for table in case.tables],
        [feature.name for case in CASES for feature in case.features],
    ):
        assert len(names) == len(set(names))


def test_at_most_eight_layers_so_at_most_eight_traces_a_backend():
    assert len(LAYERS) <= 8
