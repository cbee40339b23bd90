"""Checks of values, made as one operation that runs with the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_distembed.features import Feature

# Where an error shows a value; no feature or table has "/" in its name.
_VALUE = "{/}"


class Checks:
    """The checks on values of all features of a call.

    Those of the ids' range become one operation, whose error names every
    feature that is wrong, not the first. What must hold before the ids can be
    worked on at all is checked early, feature by feature.
    """

    def __init__(self) -> None:
        self._last: list[_Check] = []
        self._early: list[_Check] = []

    def add(self, fails: tf.Tensor, message: Callable[[], tf.Tensor]) -> None:
        """Adds a check: whether it fails, and what makes the message."""
        self._last.append(_Check(fails, message))

    def add_range_check(
        self,
        feature: Feature,
        ids: tf.Tensor,
        fails: tf.Tensor,
        bad: Callable[[], tf.Tensor],
    ) -> None:
        """Reports ids outside the table of a feature that does not drop.

        Args:
            feature: Whose ids.
            ids: `[N]`, as they came.
            fails: Scalar bool, whether any is outside.
            bad: Makes `[N]` bool, which ones are.
        """

        def message() -> tf.Tensor:
            found = tf.boolean_mask(ids, bad())
            return tf.strings.format(
                f"{feature.where}: {feature.expected_ids}. Received: id "
                f"{_VALUE} ({_VALUE} such ids in this batch). "
                f"{feature.cure_of_ids}",
                (found[0], tf.size(found)),
                placeholder=_VALUE,
            )

        self.add(fails, message)

    def add_equal(
        self,
        feature: Feature,
        what: str,
        ids: tf.Tensor,
        weights: tf.Tensor,
        compiled: bool,
    ) -> None:
        """Reports weights that do not lie beside the ids."""
        if compiled:
            return
        same_size = tf.reduce_all(tf.equal(tf.shape(ids), tf.shape(weights)))
        differ = tf.cond(
            same_size,
            lambda: tf.reduce_any(tf.not_equal(ids, weights)),
            lambda: True,
        )

        def message() -> tf.Tensor:
            return tf.strings.format(
                f"{feature.where}: the weights must have the same {what} as "
                f"the ids. Received: ids with {_VALUE}, weights with "
                f"{_VALUE}. Give each id a weight in the same place.",
                (ids, weights),
                placeholder=_VALUE,
            )

        self._early.append(_Check(differ, message))

    def add_width(
        self, feature: Feature, width: tf.Tensor, expected: int
    ) -> None:
        """Reports a dense width, unknown until now, that was not declared."""

        def message() -> tf.Tensor:
            return tf.strings.format(
                f"{feature.where}: input_shape={feature.input_shape} declares "
                f"{expected} ids an example. Received: {_VALUE} ids an example",
                width,
                placeholder=_VALUE,
            )

        self._early.append(_Check(tf.not_equal(width, expected), message))

    def add_rows_within(
        self, feature: Feature, rows: tf.Tensor, num_rows: tf.Tensor
    ) -> None:
        """Reports sparse indices outside dense_shape; `rows` ascend."""
        outside = tf.reduce_any(rows[:1] < 0) | tf.reduce_any(
            rows[-1:] >= num_rows
        )

        def message() -> tf.Tensor:
            return tf.strings.format(
                f"{feature.where}: sparse ids need row indices within their "
                f"dense_shape. Received: rows from {_VALUE} to {_VALUE}, "
                f"dense_shape[0]={_VALUE}",
                (rows[0], rows[-1], num_rows),
                placeholder=_VALUE,
            )

        self._early.append(_Check(outside, message))

    def run_early(self) -> list[tf.Operation]:
        """The operation that runs the early checks added since the last one.

        To be made a control dependency; empty if there is nothing to check.

        Raises:
            tf.errors.InvalidArgumentError: when run, if any check fails.
        """
        checks, self._early = self._early, []
        return _run(checks)

    def run(self) -> list[tf.Operation]:
        """As `run_early`, of all other checks."""
        return _run(self._last)


@dataclasses.dataclass(frozen=True)
class _Check:
    """Whether it fails, a scalar, and a function that makes the message."""

    fails: tf.Tensor
    message: Callable[[], tf.Tensor]


def _run(checks: Sequence[_Check]) -> list[tf.Operation]:
    if not checks:
        return []
    fails = tf.stack([check.fails for check in checks])

    def fail() -> tf.Tensor:
        messages = [
            tf.cond(check.fails, check.message, lambda: tf.constant(""))
            for check in checks
        ]
        found = tf.boolean_mask(tf.stack(messages), fails)
        text = tf.strings.reduce_join(found, separator=" ")
        failed = tf.debugging.Assert(False, [text], summarize=10)
        with tf.control_dependencies([failed] if failed is not None else []):
            return tf.constant(False)

    return [tf.cond(tf.reduce_any(fails), fail, lambda: tf.constant(True))]
