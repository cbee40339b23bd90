"""What the SparseCores do: lookups and row updates.

A table is sharded over all SparseCores of all chips, and every chip's batch
may ask for any row, so each operation is done here for all chips at once.

A batch is a list of entries, each a sample, a row, and a gain g (`host_ops`
has made them of ids, weights and combiner). With rows e and the gradient y'
of the activations y,

    y[sample] = sum over the sample's entries of g * e[row]
    e'[row]   = sum over the row's entries, of all chips, of g * y'[sample]

and then the optimizer takes one step on every row that has an entry; other
rows and their slots do not change.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_distembed.testing import csr_buffers, optimizer_steps

_LOOKUPS = (
    "XlaSparseDenseMatmulWithStaticBufferSize",
    "XlaSparseDenseMatmulWithCsrInput",
)
_UPDATE = "XlaSparseDenseMatmulGradWith"
_UPDATE_ENDINGS = ("AndStaticBufferSize", "AndCsrInput")
# The inputs that hold a chip's batch.
_BATCH = (
    "row_pointers",
    "sorted_sample_ids",
    "sorted_token_ids",
    "sorted_gains",
)


def is_sparsecore_op(kind: str) -> bool:
    """Whether this is the type of a SparseCore operation done here."""
    return kind in _LOOKUPS or _optimizer_of(kind) in optimizer_steps.STEPS


def _optimizer_of(kind: str) -> str:
    """The optimizer in the name of an update, or nothing."""
    for ending in _UPDATE_ENDINGS:
        if kind.startswith(_UPDATE) and kind.endswith(ending):
            return kind.removeprefix(_UPDATE).removesuffix(ending)
    return ""


def sparsecore_op(
    operation: tf.Operation,
    inputs: Sequence[Sequence[tf.Tensor]],
    sparsecores_per_chip: int,
) -> list[list[tf.Tensor]]:
    """Does a SparseCore operation for all chips.

    Args:
        operation: As it was traced, for its type and attributes.
        inputs: For each of its inputs, the value on each chip.
        sparsecores_per_chip: SparseCores of one chip.

    Returns:
        For each of its outputs, the value on each chip.
    """
    names = [argument.name for argument in operation.op_def.input_arg]
    named = dict(zip(names, inputs, strict=True))
    tables = named["embedding_table"]
    batch = [named[name] for name in _BATCH]
    whole = tf.concat(tables, axis=0)
    if operation.type in _LOOKUPS:
        samples = operation.get_attr("input_size")
        entries = _entries(batch, whole, samples, sparsecores_per_chip)
        whole = _quantized(operation, whole)
        return [lookup(entries, whole, samples, len(tables))]
    gradients = named["activation_gradients"]
    entries = _entries(
        batch, whole, tf.shape(gradients[0])[0], sparsecores_per_chip
    )
    step = optimizer_steps.STEPS[_optimizer_of(operation.type)]
    settings = {key: operation.get_attr(key) for key in step.settings}
    limits = (
        operation.get_attr("clip_weight_min"),
        operation.get_attr("clip_weight_max"),
    )

    def take_step(
        gradient: tf.Tensor, rows: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        # The learning rate is the same on all chips.
        learning_rate = named["learning_rate"][0]
        table, *slots = step.function(gradient, rows, learning_rate, **settings)
        return [tf.clip_by_value(table, *limits), *slots]

    slots = [tf.concat(named[name], axis=0) for name in step.slots]
    moved = update(
        entries, tf.concat(gradients, axis=0), [whole, *slots], take_step
    )
    return [tf.split(each, len(tables)) for each in moved]


def _entries(
    batch: Sequence[Sequence[tf.Tensor]],
    table: tf.Tensor,
    samples: tf.Tensor | int,
    sparsecores_per_chip: int,
) -> csr_buffers.Entries:
    """The entries of all chips, their samples numbered through."""
    chips = len(batch[0])
    shards = chips * sparsecores_per_chip

    def read(
        samples: np.ndarray, rows: np.ndarray, *buffers: np.ndarray
    ) -> list[np.ndarray]:
        parts = [
            csr_buffers.entries(
                *buffers[chip::chips],
                sparsecores=sparsecores_per_chip,
                shards=shards,
                samples=int(samples),
                rows_per_shard=int(rows) // shards,
            )
            for chip in range(chips)
        ]
        for chip, part in enumerate(parts):
            part.samples[:] += np.int32(chip * samples)
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    columns = tf.numpy_function(
        read,
        [
            samples,
            tf.shape(table)[0],
            *(each for part in batch for each in part),
        ],
        [tf.int32, tf.int32, tf.float32],
    )
    for column in columns:
        column.set_shape([None])
    return csr_buffers.Entries(*columns)


def lookup(
    entries: csr_buffers.Entries, table: tf.Tensor, samples: int, chips: int
) -> list[tf.Tensor]:
    """The activations of each chip, `[samples, width]`.

    Args:
        entries: Of all chips, as tensors.
        table: All shards of the stack, `[rows, width]`.
        samples: Rows of one chip's activations.
        chips: How many there are.
    """
    rows = tf.gather(table, entries.rows) * entries.gains[:, tf.newaxis]
    activations = tf.math.unsorted_segment_sum(
        rows, entries.samples, samples * chips
    )
    return tf.split(activations, chips)


def update(
    entries: csr_buffers.Entries,
    gradient: tf.Tensor,
    state: Sequence[tf.Tensor],
    take_step: Callable[[tf.Tensor, list[tf.Tensor]], list[tf.Tensor]],
) -> list[tf.Tensor]:
    """One optimizer step on all rows that were looked up.

    Args:
        entries: Of all chips, as tensors.
        gradient: Of the activations of all chips, `[chips * samples, width]`.
        state: The table and its slots, all shards, each `[rows, width]`.
        take_step: `(gradient, [table rows, slot rows...])` -> the rows after
            the step.

    Returns:
        `state` after the step.
    """
    touched, place = tf.unique(entries.rows)
    total = tf.math.unsorted_segment_sum(
        tf.gather(gradient, entries.samples) * entries.gains[:, tf.newaxis],
        place,
        tf.size(touched),
    )
    rows = take_step(total, [tf.gather(each, touched) for each in state])
    return [
        tf.tensor_scatter_nd_update(each, touched[:, tf.newaxis], new)
        for each, new in zip(state, rows, strict=True)
    ]


def _quantized(operation: tf.Operation, table: tf.Tensor) -> tf.Tensor:
    """The table as a lookup with a QuantizationConfig sees it."""
    buckets = operation.get_attr("quantization_config_num_buckets")
    if not buckets:
        return table
    low = operation.get_attr("quantization_config_low")
    high = operation.get_attr("quantization_config_high")
    step = (high - low) / (buckets - 1)
    clipped = tf.clip_by_value(table, low, high)
    return tf.round((clipped - low) / step) * step + low
