"""Runs shared by the tests of the registry."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conformance.backends import BACKENDS
from tests.conformance.reference import Result
from tests.conformance.registry import LAYERS


@pytest.fixture(scope="session")
def run_of(request: pytest.FixtureRequest) -> Callable[[str, str], Result]:
    """(Backend, layer) -> what came out; each is run once a session.

    A run that raised raises the same again for each of its cases.
    """
    runs: dict[tuple[str, str], Result | Exception] = {}

    def run(backend: str, layer: str) -> Result:
        if (backend, layer) not in runs:
            optimizer, _, _ = LAYERS[layer]
            try:
                runs[backend, layer] = BACKENDS[backend].run(
                    BACKENDS[backend].layer(layer),
                    optimizer,
                    request.getfixturevalue,
                )
            except Exception as error:
                runs[backend, layer] = error
        done = runs[backend, layer]
        if isinstance(done, Exception):
            raise done
        return done

    return run
