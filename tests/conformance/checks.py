"""What the test file of every backend does with each of its cases."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from tests.conformance.backends import BACKENDS
from tests.conformance.cases import Case
from tests.conformance.comparison import mismatches
from tests.conformance.reference import Reference, Result
from tests.conformance.registry import LAYERS, OPTIMIZERS


def cases_of(backend: str, slow: Collection[str] = ()) -> list[Any]:
    """The cases that hold on a backend, as parameters of a test.

    Args:
        backend: key into BACKENDS.
        slow: layers whose cases are marked slow.
    """
    return [
        pytest.param(
            case,
            id=f"{name}-{case.name}",
            marks=[pytest.mark.slow] if name in slow else [],
        )
        for name in BACKENDS[backend].layers
        for case in BACKENDS[backend].layer(name).cases
    ]


def check(
    backend: str, case: Case, run_of: Callable[[str, str], Result]
) -> None:
    """Compares what a backend has made of a case with the reference."""
    optimizer, _, _ = LAYERS[case.layer]
    expected = Reference(OPTIMIZERS).run(case, optimizer)
    wrong = mismatches(run_of(backend, case.layer), expected)
    assert not wrong, "\n".join(
        [f"{case.name} on {backend}, layer '{case.layer}':", *wrong]
    )
