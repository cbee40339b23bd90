"""Turns off what tunes `tf.data` pipelines while they run, for tests.

Every iterator has a thread that tunes its pipeline and sleeps in between,
twice as long each time, up to a minute. TensorFlow wakes it before it marks
the iterator as cancelled, so on a busy machine the thread may look too early
and sleep on, and whoever frees the iterator waits. Tests free hundreds of them.
"""

from __future__ import annotations

import tensorflow as tf


def turn_off() -> None:
    """Turns it off for all iterators of this process.

    Options of a dataset do not reach the iterators that `tf.distribute` makes
    on each device; the hook of tf.data's own debug mode does.
    """
    tf.data.Dataset._apply_debug_options = _not_tuned


def _not_tuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
