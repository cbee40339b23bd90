"""Which rows of a batch are real, where others were added to fill it up.

A TPU takes batches of one number of rows, so the step helpers add rows to a
short one. Ragged and sparse ids are then empty there, but dense ids are zeros,
which would be looked up, and row 0 of the table touched. While a model is
called on such a batch, its lookups read here which rows hold ids.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import tensorflow as tf

_MASK: contextvars.ContextVar[tf.Tensor | None] = contextvars.ContextVar(
    "tf_distembed_real_rows", default=None
)


@contextlib.contextmanager
def marked(mask: tf.Tensor | None) -> Iterator[None]:
    """While entered, lookups take the ids of the rows in `mask` alone.

    Args:
        mask: `[B]` numbers, 0 for each added row; None: all rows are real.
    """
    token = _MASK.set(mask)
    try:
        yield
    finally:
        _MASK.reset(token)


def mask() -> tf.Tensor | None:
    """The mask that is in force, bool `[B]`, or None."""
    current = _MASK.get()
    return None if current is None else tf.cast(current, tf.bool)
