"""The suite notices a broken rule: each rule is broken in the reference.

A case says which breaks it shows. Here the right reference takes the place of
the expectation and a broken one that of a backend: each case that claims to
show a break must fail, every break must be shown, and every case must show
one. NumPy only.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance import registry
from tests.conformance.breaks import BREAKS
from tests.conformance.cases import Case
from tests.conformance.comparison import TOLERANCE, mismatches
from tests.conformance.reference import Reference, Result


def run(case: Case, rules: type[Reference]) -> Result:
    optimizer, _, _ = registry.LAYERS[case.layer]
    with np.errstate(divide="ignore", invalid="ignore"):
        return rules(registry.OPTIMIZERS).run(case, optimizer)


@pytest.mark.parametrize("name", BREAKS)
def test_cases_that_claim_a_break_fail_under_it(name):
    claiming = [case for case in registry.CASES if name in case.shows]
    assert claiming, f"no case shows {name!r}"
    blind = [
        case.name
        for case in claiming
        # Far more than what the suite tolerates.
        if not mismatches(
            run(case, BREAKS[name]), run(case, Reference), 10 * TOLERANCE
        )
    ]
    assert not blind, f"these cases do not notice {name!r}: {blind}"


@pytest.mark.parametrize("case", registry.CASES, ids=lambda case: case.name)
def test_every_case_claims_a_break_that_exists(case):
    assert case.shows
    assert set(case.shows) <= set(BREAKS)


@pytest.mark.parametrize("case", registry.CASES, ids=lambda case: case.name)
def test_the_right_rules_agree_with_themselves(case):
    assert not mismatches(run(case, Reference), run(case, Reference), 0.0)
