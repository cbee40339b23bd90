"""The SparseCore emulator as a pytest fixture.

In the `conftest.py` at the root of your tests:

    pytest_plugins = ["tf_distembed.testing.pytest_plugin"]

pytest then makes the logical CPUs before it imports a test, as many as the
setting `sparsecore_emulator_chips` says (4 by default), and tests can ask for
`sparsecore_emulator`.
"""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import tensorflow as tf

from tf_distembed.testing import emulator

_CHIPS = "sparsecore_emulator_chips"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Tells pytest of the setting."""
    parser.addini(
        _CHIPS, "chips of the largest SparseCore emulator", default="4"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Makes the logical CPUs, before a test module can start TensorFlow."""
    emulator.prepare(int(config.getini(_CHIPS)))


@pytest.fixture
def sparsecore_emulator() -> Iterator[Callable[..., tf.distribute.TPUStrategy]]:
    """Enters an emulator for the rest of the test.

    A function with the arguments of `tf_distembed.testing.sparsecore_emulator`
    that returns the strategy:

        def test_layer(sparsecore_emulator):
            strategy = sparsecore_emulator(num_chips=2)
            with strategy.scope():
                ...
    """
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(
            emulator.sparsecore_emulator(*args, **kwargs)
        )
