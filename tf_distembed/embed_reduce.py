"""`EmbedReduce`: a Keras embedding whose looked-up rows are combined."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_distembed import combiners
from tf_distembed.backends import compilation
from tf_distembed.bags import to_bags
from tf_distembed.config import TableConfig
from tf_distembed.features import Feature
from tf_distembed.inputs import (
    DENSE,
    as_tensor,
    check_feature,
    kind_of,
)
from tf_distembed.tables import densely_trained
from tf_distembed.value_checks import Checks


@dataclasses.dataclass(frozen=True, eq=False)
class _Input(Feature):
    """The one input of the layer; errors call it by the layer's name."""

    @property
    def where(self) -> str:
        return f"Layer '{self.name}'"

    @property
    def expected_ids(self) -> str:
        size = self.table.vocabulary_size
        return f"input_dim={size}, so ids run from 0 to {size - 1}"

    @property
    def cure_of_ids(self) -> str:
        return "Fix the ids, or raise input_dim."


@keras.saving.register_keras_serializable(package="tf_distembed")
class EmbedReduce(keras.layers.Embedding):
    """Looks up ids and combines the rows of each example into one vector.

    A `keras.layers.Embedding` in all else: one weight, `embeddings`, trained
    by the model's optimizer at that optimizer's cost, which is that of the
    whole table. The gradients of a repeated id are summed before the optimizer
    sees them. For large tables use `DistributedEmbedding`, whose steps cost
    what the batch costs.

    With `e` the rows of an example's ids and `w` their weights (1 if none are
    given), as `tf.nn.embedding_lookup_sparse` defines them:

    ```
    sum    Σ w·e        mean   Σ w·e / Σ w        sqrtn  Σ w·e / √(Σ w²)
    ```

    An empty row, and one whose denominator is zero, give zeros with zero
    gradients.

    Args:
        input_dim: Number of rows; ids run from 0 to `input_dim - 1`.
        output_dim: Width of a row.
        embeddings_initializer: A Keras initializer.
        embeddings_regularizer: A Keras regularizer of all rows, or None.
        embeddings_constraint: A Keras constraint of all rows, or None.
        mask_zero: Whether id 0 is padding: it is taken out of its example
            before any denominator, and row 0 gets no gradient. No mask is
            handed on, since the output has no positions left to mask.
        weights: The first values of `embeddings`, `[input_dim, output_dim]`.
        combiner: `"mean"`, `"sum"` or `"sqrtn"`.
        **kwargs: `name`, `dtype`, `trainable`, `lora_rank`, `lora_alpha`, as
            of `keras.layers.Embedding`.

    Call arguments:
        inputs: Ids of an integer dtype: dense `[B]` (one id an example) or
            `[B, S]`, ragged or sparse `[B, S]`.
        weights: None, or weights of the same kind and shape as the ids.

    Call output: `[B, output_dim]`, of the layer's compute dtype.

    Raises:
        TypeError: ids or weights of a dtype that they cannot have.
        ValueError: an unknown combiner, a quantized dtype, ids of another
            rank, or weights that do not lie beside the ids.
        tf.errors.InvalidArgumentError: when run, an id outside the table.
            Where XLA compiles the layer no error can be raised, and the id is
            left out.

    Example:

    ```python
    import tensorflow as tf
    import tf_distembed as tde

    layer = tde.EmbedReduce(1_000, 8, combiner="sum")
    seen = tf.ragged.constant([[7, 7, 5], []], dtype=tf.int64)
    assert layer(seen).shape == (2, 8)
    ```
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        weights: Any = None,
        combiner: str = "mean",
        **kwargs: Any,
    ) -> None:
        if kwargs.get("quantization_config") is not None:
            raise ValueError(
                "EmbedReduce cannot be quantized. Received: "
                f"quantization_config={kwargs['quantization_config']!r}"
            )
        super().__init__(
            input_dim,
            output_dim,
            embeddings_initializer=embeddings_initializer,
            embeddings_regularizer=embeddings_regularizer,
            embeddings_constraint=embeddings_constraint,
            mask_zero=mask_zero,
            weights=weights,
            **kwargs,
        )
        if self.quantization_mode is not None:
            raise ValueError(
                f"Layer '{self.name}': EmbedReduce cannot be quantized. "
                f"Received: dtype={self.dtype_policy!r}"
            )
        # Ids are never cast, and may come as lists.
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True
        self.combiner = combiner
        # Its checks are the same as those of any table.
        table = TableConfig(
            self.name, input_dim, output_dim, optimizer=None, combiner=combiner
        )
        self._input = _Input(
            name=self.name,
            path=(),
            table=table,
            input_shape=None,
            output_shape=None,
            drops_invalid_ids=False,
            padding_id=0 if mask_zero else None,
        )
        self._reader: Callable[[tf.Tensor], tf.Tensor] | None = None

    def add_weight(self, *args: Any, **kwargs: Any) -> keras.Variable:
        """As of any layer; the weight is never cast when it is read.

        Rows are combined in the weight's own dtype, also inside a layer of a
        mixed policy, which would else cast the whole table at each lookup.
        """
        kwargs.setdefault("autocast", False)
        return super().add_weight(*args, **kwargs)

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs: Any, weights: Any = None) -> tf.Tensor:
        """Looks up and combines; see the class."""
        ids, weights = self._checked(inputs, weights)
        compiled = compilation.compiled_by_xla()
        checks = Checks()
        bags = to_bags(
            self._input, ids, weights, compiled=compiled, checks=checks
        )
        with tf.control_dependencies(checks.run()):
            rows = self._rows(bags.ids)
        places = tf.range(tf.size(bags.ids))
        output = combiners.pool(rows, [places], [bags], [self.combiner])[0]
        batch = bags.num_bags if isinstance(bags.num_bags, int) else None
        output = tf.ensure_shape(output, [batch, self.output_dim])
        return tf.cast(output, self.compute_dtype)

    def compute_mask(self, inputs: Any, mask: Any = None) -> None:
        """None: the output has no positions left to mask."""
        return None

    def compute_output_shape(
        self, input_shape: Any, weights_shape: Any = None
    ) -> tuple[int | None, int]:
        """`(B, output_dim)`."""
        return (input_shape[0], self.output_dim)

    def compute_output_spec(
        self, inputs: Any, weights: Any = None
    ) -> keras.KerasTensor:
        """A dense Keras tensor, whatever the kind of the ids."""
        ids, _ = self._checked(inputs, weights)
        return keras.KerasTensor(
            self.compute_output_shape(tuple(ids.shape)), self.compute_dtype
        )

    def get_config(self) -> dict[str, Any]:
        """The configuration of the embedding, and the combiner."""
        return {**super().get_config(), "combiner": self.combiner}

    @contextlib.contextmanager
    def reading_rows(
        self, reader: Callable[[tf.Tensor], tf.Tensor]
    ) -> Iterator[None]:
        """While entered, rows come from `reader`: ids `[N]` -> `[N, D]`.

        An export traces the model so, to leave out what only training needs.
        """
        self._reader = reader
        try:
            yield
        finally:
            self._reader = None

    def _checked(self, inputs: Any, weights: Any) -> tuple[Any, Any]:
        ids = as_tensor(self._input, inputs)
        if weights is not None:
            weights = as_tensor(self._input, weights, "weights")
        check_feature(self._input, ids, weights)
        if kind_of(ids) != DENSE:
            # XLA would compile anew for every number of ids.
            self.supports_jit = False
        return ids, weights

    def _rows(self, ids: tf.Tensor) -> tf.Tensor:
        if self._reader is not None:
            return self._reader(ids)
        table = self.embeddings
        trainable = True  # a tensor of the table and its LoRA weights
        if isinstance(table, keras.Variable):
            table, trainable = table.value, table.trainable
        if trainable:
            table = densely_trained(table)
        return tf.gather(table, ids)
