"""What a placement of tables must be able to do."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tf_distembed.features import Feature
from tf_distembed.id_statistics import DroppedIds, LimitStatistics


class Backend(abc.ABC):
    """The tables of one placement.

    Attributes:
        placement: `"default_device"` or `"sparsecore"`.
        features: The features placed here, in flat order.
        optimizers: table name -> optimizer in use, for those with their own.
        dropped: Counts the dropped ids of these features.
        limit_statistics: Measures SparseCore limits, if that was asked for.
    """

    placement: ClassVar[str]
    features: Sequence[Feature]
    optimizers: dict[str, Any]
    dropped: DroppedIds
    limit_statistics: LimitStatistics | None = None

    @abc.abstractmethod
    def lookup(
        self,
        ids: Sequence[Any],
        weights: Sequence[Any],
        training: bool,
    ) -> list[tf.Tensor]:
        """Looks up and combines one batch.

        Args:
            ids: For each feature a dense, ragged or sparse tensor.
            weights: For each feature the same kind, or None.
            training: Whether a gradient is likely to be taken.

        Returns:
            For each feature `[B, D]` or `[B, S, D]`, of the tables' dtype.
        """

    @property
    def is_built(self) -> bool:
        """Whether the variables are there."""
        return True

    def check_built(self) -> None:
        """Raises RuntimeError where the variables are not there yet."""
        return  # Most backends make them at once.

    def when_built(self, write: Callable[[], None]) -> None:
        """Calls `write`: now, or as soon as the variables are there."""
        write()

    @abc.abstractmethod
    def slot_shapes(self) -> dict[str, dict[str, tuple[int, int]]]:
        """table name -> {`"values"` and each slot name: shape}."""

    @abc.abstractmethod
    def slot_dtype(self, table: str) -> str:
        """Name of the dtype of a table and its slots."""

    def values_variable(self, table: str) -> tf.Variable | None:
        """A variable of one device that holds all rows, if there is one."""
        return None

    @abc.abstractmethod
    def read_rows(
        self, table: str, slot: str, start: int, stop: int
    ) -> tf.Tensor:
        """Rows `start` to `stop` of a table's values or of a slot."""

    @abc.abstractmethod
    def write_rows(self, table: str, slot: str, ids: Any, values: Any) -> None:
        """Overwrites the rows `ids` of a table's values or of a slot."""

    @abc.abstractmethod
    def first_value(self, table: str, slot: str) -> float:
        """What every entry of a slot starts at."""

    @abc.abstractmethod
    def read_step(self, table: str) -> tf.Tensor | None:
        """A table's step count, or None if it has no optimizer of its own."""

    @abc.abstractmethod
    def keras_parts(self) -> dict[str, Any]:
        """What the layer holds for Keras to find.

        For a table that is a Keras variable, its name -> its sub-layer; any
        other name -> a variable.
        """

    def check_steps(self, steps: dict[str, int]) -> None:  # noqa: B027
        """Raises for step counts that these tables cannot all have.

        Args:
            steps: table name -> the step count it is to get; other tables
                keep theirs.
        """

    @abc.abstractmethod
    def write_step(self, table: str, step: Any) -> None:
        """Sets a table's step count."""
