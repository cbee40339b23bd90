"""Initial table values, drawn block by block.

A table is drawn in blocks of 65,536 rows, each from a seed made of the
table's seed and the block's number. So every backend, shard and device count
starts from the same rows, and no more than a block need be held at a time.
That is possible for laws that do not depend on the number of rows; others
are drawn whole, on the host.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

BLOCK_ROWS = 65_536

# Drawing whole needs the values twice on the host for a moment.
MAX_WHOLE_BYTES = 4 * 2**30

_ARRAY = "tf_distembed>array"
_ROW_WISE = (
    keras.initializers.RandomUniform,
    keras.initializers.RandomNormal,
    keras.initializers.TruncatedNormal,
    keras.initializers.Zeros,
    keras.initializers.Ones,
    keras.initializers.Constant,
)


class InitialValues:
    """The values that one table starts from.

    Args:
        initializer: As `TableConfig.initializer`.
        shape: `(vocabulary_size, embedding_dim)`.
        dtype: Name of the table's dtype.
        where: What an error calls the table.

    Raises:
        ValueError: the law depends on the number of rows and the table is too
            large to be drawn whole.

    Example, two blocks of a table of 100,000 rows:

    ```python
    from tf_distembed.initial_values import InitialValues

    values = InitialValues("uniform", (100_000, 8), "float32", "Table 't'")
    shapes = [block.shape for _, block in values.blocks()]
    assert shapes == [(65_536, 8), (34_464, 8)]
    ```
    """

    def __init__(
        self, initializer: Any, shape: tuple[int, int], dtype: str, where: str
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self._where = where
        self._whole: Any = None
        if _is_array(initializer):
            self._whole = initializer
            return
        self._law = _resolve(initializer, where)
        if _is_row_wise(self._law):
            self._seed = _seed(self._law)
            return
        size = shape[0] * shape[1] * tf.as_dtype(dtype).size
        if size > MAX_WHOLE_BYTES:
            raise ValueError(
                f"{where}: the initializer {initializer!r} must be drawn "
                f"whole, since its values depend on the number of rows or are "
                f"not known to be independent of it; {size / 2**30:.1f} GiB "
                f"is more than the {MAX_WHOLE_BYTES / 2**30:.0f} GiB that is "
                "allowed. Use uniform, (truncated) normal, zeros, ones, "
                "constant or VarianceScaling(mode='fan_out'), or set the rows "
                "with set_embedding_tables."
            )

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (first row, values `[rows, embedding_dim]`) in row order."""
        rows, dim = self.shape
        whole = self._whole
        if whole is None and not _is_row_wise(self._law):
            with tf.init_scope(), tf.device("CPU:0"):
                whole = self._draw_whole()
        for start in range(0, rows, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, rows)
            if whole is None:
                yield start, self._draw(start // BLOCK_ROWS, stop - start, dim)
            else:
                part = np.asarray(whole[start:stop])
                yield start, part.astype(tf.as_dtype(self.dtype).as_numpy_dtype)

    def _draw(self, block: int, rows: int, dim: int) -> np.ndarray:
        config = self._law.get_config()
        if "seed" in config:
            sequence = np.random.SeedSequence([self._seed, block])
            config["seed"] = int(sequence.generate_state(1)[0] >> 1)
        law = type(self._law).from_config(config)
        # Always on the host and eagerly: equal numbers on every device.
        with tf.init_scope(), tf.device("CPU:0"):
            return np.asarray(law((rows, dim), dtype=self.dtype))

    def _draw_whole(self) -> np.ndarray:
        values = np.asarray(self._law(self.shape, dtype=self.dtype))
        if values.shape != self.shape:
            raise ValueError(
                f"{self._where}: the initializer {self._law!r} must return "
                f"values of shape {self.shape}. Received: shape={values.shape}"
            )
        return values


def check_initializer(
    initializer: Any, shape: tuple[int, int], where: str
) -> None:
    """Raises unless `initializer` can fill a table of `shape`.

    Raises:
        TypeError: an array of something else than numbers.
        ValueError: an unknown initializer, or an array of another shape.
    """
    if _is_array(initializer):
        if tuple(initializer.shape) != shape:
            raise ValueError(
                f"{where}: an array as initializer must have the shape "
                f"[vocabulary_size, embedding_dim], {shape}. "
                f"Received: shape={tuple(initializer.shape)}"
            )
        if not is_numeric(initializer.dtype):
            raise TypeError(
                f"{where}: an array as initializer must hold floats or "
                f"integers. Received: dtype={initializer.dtype}"
            )
        return
    _resolve(initializer, where)


def serialize(initializer: Any) -> Any:
    """A form of `initializer` that Keras can write as JSON."""
    if _is_array(initializer):
        # Keras would write an array as the text of each number.
        array = np.asarray(initializer)
        return {
            "class_name": _ARRAY,
            "shape": list(array.shape),
            "dtype": array.dtype.name,
            "base64": base64.b64encode(array.tobytes()).decode("ascii"),
        }
    if initializer is None or isinstance(initializer, str):
        return initializer
    if isinstance(initializer, type):
        initializer = initializer()
    if isinstance(initializer, dict):
        initializer = keras.initializers.get(initializer)
    return keras.saving.serialize_keras_object(initializer)


def deserialize(config: Any) -> Any:
    """The initializer that `serialize` was given."""
    if isinstance(config, dict):
        if config.get("class_name") == _ARRAY:
            dtype = tf.as_dtype(config["dtype"]).as_numpy_dtype
            values = np.frombuffer(base64.b64decode(config["base64"]), dtype)
            return values.reshape(config["shape"])
        return keras.saving.deserialize_keras_object(config)
    return config


def is_numeric(dtype: Any) -> bool:
    """Whether a NumPy or TensorFlow dtype is of floats or integers."""
    try:
        kind = tf.as_dtype(dtype)
    except TypeError:
        return False
    return bool(kind.is_floating or kind.is_integer)


def _is_array(initializer: Any) -> bool:
    return isinstance(initializer, (np.ndarray, tf.Tensor, tf.Variable))


def _resolve(initializer: Any, where: str) -> Any:
    if initializer is None:
        return keras.initializers.VarianceScaling(mode="fan_out")
    try:
        law = keras.initializers.get(initializer)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{where}: initializer must be None, a Keras initializer, its "
            "name or class, a callable or an array. "
            f"Received: {initializer!r}"
        ) from error
    if isinstance(law, type):
        law = law()
    if not callable(law):
        raise ValueError(
            f"{where}: an initializer must be callable. "
            f"Received: {initializer!r}"
        )
    return law


def _is_row_wise(law: Any) -> bool:
    if type(law) is keras.initializers.VarianceScaling:
        return law.mode == "fan_out"
    if type(law) is keras.initializers.Constant:
        return np.ndim(law.value) < 2  # one value, or one row
    return type(law) in _ROW_WISE


def _seed(law: Any) -> int:
    """The seed given by the user, else a new one.

    Keras draws its default seeds from Python's `random`, which
    `keras.utils.set_random_seed` seeds. A new seed a table, even for an
    initializer object that several tables share.
    """
    seed = law.get_config().get("seed")
    if isinstance(seed, int):
        return seed
    if seed is not None:  # a SeedGenerator: draw from it, as Keras would
        with tf.init_scope():
            return int(np.asarray(law.seed.next())[1])
    return random.randint(1, 10**9)
