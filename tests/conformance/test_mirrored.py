"""Cases of the registry on two replicas."""

from __future__ import annotations

import pytest

from tests.conformance.checks import cases_of, check


@pytest.mark.parametrize("case", cases_of("mirrored"))
def test_case_equals_the_reference(case, run_of):
    check("mirrored", case, run_of)
