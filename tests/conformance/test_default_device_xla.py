"""The cases with dense inputs, compiled by XLA."""

from __future__ import annotations

import pytest

from tests.conformance.checks import cases_of, check


@pytest.mark.parametrize("case", cases_of("default_device_xla"))
def test_case_equals_the_reference(case, run_of):
    check("default_device_xla", case, run_of)
