"""Every case that holds on SparseCores, on two chips with two each."""

from __future__ import annotations

import pytest

from tests.conformance.checks import cases_of, check


@pytest.mark.parametrize("case", cases_of("sparsecore_2x2"))
def test_case_equals_the_reference(case, run_of):
    check("sparsecore_2x2", case, run_of)
