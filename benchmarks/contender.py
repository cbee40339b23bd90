"""What is compared: one way to look up, and to train, a workload's tables."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.workloads import Batch, Workload

LEARNING_RATE = 0.01
#: What Keras' optimizers put into their slots at first, in order.
FIRST_SLOTS: dict[str, list[float]] = {
    "sgd": [],
    "adagrad": [0.1],
    "adam": [0.0, 0.0],
    "ftrl": [0.1, 0.0],
}


class Contender(abc.ABC):
    """The tables of one workload in one framework.

    What a call does is looking up, combining and, in training, the update.
    Ids are already in the framework's own tensors, and the gradients of the
    outputs are given, in the form in which the contender has its outputs; so
    nothing else is in the time.
    """

    #: What tables and plots call it.
    title: str

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._inputs: list[Any] | None = None

    @abc.abstractmethod
    def inputs_of(self, batch: Batch) -> Any:
        """The batch in the framework's tensors."""

    @abc.abstractmethod
    def forward(self, inputs: Any) -> Any:
        """The outputs, without any preparation of a training step."""

    def outputs_of(self, inputs: Any) -> np.ndarray:
        """The outputs `[F, B, D]`, to be compared with those of others."""
        return np.stack([np.asarray(one) for one in self.forward(inputs)])

    @abc.abstractmethod
    def train(self, inputs: Any) -> None:
        """One step; returns when it is done."""

    @abc.abstractmethod
    def set_tables(self, values: Sequence[np.ndarray]) -> None:
        """Sets the values of all tables."""

    @abc.abstractmethod
    def get_tables(self) -> list[np.ndarray]:
        """The values of all tables."""

    def calls(self, *, training: bool) -> Callable[[], None]:
        """A function whose calls take the workload's batches in turn."""
        if self._inputs is None:
            self._inputs = [self.inputs_of(b) for b in self.workload.batches]
        inputs = self._inputs
        run: Callable[[Any], Any] = self.train if training else self.forward
        turn = 0

        def call() -> None:
            nonlocal turn
            run(inputs[turn])
            turn = (turn + 1) % len(inputs)

        return call
