"""The ways in which the cases are run; one more is one more entry.

Each has a test file of its own, so that processes can share the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tf_distembed as tde
from tests.conformance.cases import BATCH, DEFAULT_DEVICE, SPARSECORE, Layer
from tests.conformance.reference import Result
from tests.conformance.registry import LAYERS, layer_of
from tests.conformance.runners import run_layer
from tests.unoptimized import unoptimized


@dataclasses.dataclass(frozen=True)
class Backend:
    """A way to run a layer.

    `run` receives the layer, the key of its usual optimizer and a function
    that gives a session fixture by its name.
    """

    run: Callable[[Layer, str, Callable[[str], Any]], Result]
    #: Family named by the cases' `backends`.
    family: str = DEFAULT_DEVICE
    #: Whether XLA compiles the step, which it does for dense inputs.
    xla: bool = False
    #: The layers it runs, where the others would show nothing new.
    layers: tuple[str, ...] = tuple(LAYERS)

    def layer(self, name: str) -> Layer:
        """The cases of the layer that hold on this backend."""
        return layer_of(
            name, family=self.family, dense_only=self.xla, compiled=self.xla
        )


def _in_function(layer: Layer, optimizer: str, fixture: Callable) -> Result:
    return run_layer(
        layer,
        optimizer,
        compiled=lambda step, signature: tf.function(
            step, input_signature=[signature], autograph=False
        ),
    )


def _eagerly(layer: Layer, optimizer: str, fixture: Callable) -> Result:
    return run_layer(layer, optimizer)


def _by_xla(layer: Layer, optimizer: str, fixture: Callable) -> Result:
    return run_layer(
        layer,
        optimizer,
        compiled=lambda step, signature: tf.function(
            step,
            input_signature=[signature],
            autograph=False,
            jit_compile=True,
        ),
    )


def _mirrored(layer: Layer, optimizer: str, fixture: Callable) -> Result:
    def uneven(rows: int) -> list[range]:
        first = min(rows, 5)
        return [range(first), range(first, rows)]

    return run_layer(
        layer, optimizer, strategy=fixture("mirrored"), shares=uneven
    )


def _on_emulator(chips: int, cores: int) -> Callable[..., Result]:
    """Runs on an emulated TPU, whose chips share the rows of each batch."""

    def shares(rows: int) -> list[range]:
        return [
            range(chip * rows // chips, (chip + 1) * rows // chips)
            for chip in range(chips)
        ]

    def run(layer: Layer, optimizer: str, fixture: Callable) -> Result:
        with (
            unoptimized(),
            tde.testing.sparsecore_emulator(chips, cores) as strategy,
        ):
            return run_layer(
                layer,
                optimizer,
                strategy=strategy,
                shares=shares,
                sees_gradients=False,
                # Without it, a batch is what the trace says.
                declared_batch=BATCH if len(set(layer.batches)) > 1 else None,
            )

    return run


_SPARSECORE_LAYERS = tuple(
    name for name in LAYERS if layer_of(name, family=SPARSECORE).cases
)

BACKENDS = {
    "default_device": Backend(_in_function),
    "default_device_eager": Backend(_eagerly),
    "default_device_xla": Backend(_by_xla, xla=True),
    # Each replica looks up as a single device does; updates are what differs.
    "mirrored": Backend(
        _mirrored,
        layers=("adam", "batches", "momentum", "ftrl", "native", "model"),
    ),
    **{
        f"sparsecore_{chips}x{cores}": Backend(
            _on_emulator(chips, cores),
            family=SPARSECORE,
            layers=_SPARSECORE_LAYERS,
        )
        for chips, cores in ((1, 4), (2, 2), (2, 4))
    },
}
