"""Every case that holds on SparseCores, on one chip with four."""

from __future__ import annotations

import pytest

from tests.conformance.checks import cases_of, check
from tests.conformance.registry import LAYERS

# The others take minutes.
FAST = "ftrl"
SLOW = set(LAYERS) - {FAST}


@pytest.mark.parametrize("case", cases_of("sparsecore_1x4", slow=SLOW))
def test_case_equals_the_reference(case, run_of):
    check("sparsecore_1x4", case, run_of)
