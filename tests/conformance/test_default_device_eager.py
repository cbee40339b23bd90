"""Every case of the registry, executed eagerly."""

from __future__ import annotations

import pytest

from tests.conformance.checks import cases_of, check


@pytest.mark.parametrize("case", cases_of("default_device_eager"))
def test_case_equals_the_reference(case, run_of):
    check("default_device_eager", case, run_of)
