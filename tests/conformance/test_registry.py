"""The registry itself: every case runs, and is left out only for a reason."""

from __future__ import annotations

import pytest

from tests.conformance.backends import BACKENDS
from tests.conformance.checks import cases_of
from tests.conformance.registry import CASES, LAYERS


def test_every_case_runs_somewhere():
    run = {p.values[0].name for b in BACKENDS for p in cases_of(b)}
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
