"""What the SparseCores do: lookups and row updates, in plain TensorFlow.

A table is sharded over all SparseCores of all chips, and every chip's batch
may ask for any row, so each function here takes the operands of all chips.

One chip's batch arrives as the host operations left it (`host_ops` draws the
layout): for each SparseCore of the chip, the entries are grouped by the
SparseCore that holds the row, each entry a `(sample, row, gain)`. With gains
g, rows e and the gradient y' of the activations y,

    y[sample] = sum over its entries of g * e[row]
    e'[row]   = sum over all entries of the row, of all chips, of g * y'[sample]

and then the optimizer takes one step on every row that has an entry; other
rows and their slots do not change.
"""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_distembed.testing import optimizer_steps
from tf_distembed.testing.csr_buffers import ALIGNMENT

_LOOKUP = "XlaSparseDenseMatmulWith"
_UPDATE = "XlaSparseDenseMatmulGradWith"
_ENDINGS = ("AndStaticBufferSize", "AndCsrInput")
_LOOKUPS = (f"{_LOOKUP}StaticBufferSize", f"{_LOOKUP}CsrInput")


def is_sparsecore_op(kind: str) -> bool:
    """Whether this is the type of a SparseCore operation done here."""
    return kind in _LOOKUPS or _optimizer_of(kind) in optimizer_steps.STEPS


def _optimizer_of(kind: str) -> str:
    """The optimizer in the name of an update, or nothing."""
    for ending in _ENDINGS:
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
    named = dict(
        zip(
            (argument.name for argument in operation.op_def.input_arg),
            inputs,
            strict=True,
        )
    )
    batches = [
        Batch(pointers, samples, rows, gains, sparsecores_per_chip)
        for pointers, samples, rows, gains in zip(*inputs[:4], strict=True)
    ]
    if operation.type in _LOOKUPS:
        tables = [
            _quantized(operation, table) for table in named["embedding_table"]
        ]
        return [lookup(batches, tables, operation.get_attr("input_size"))]
    step = optimizer_steps.STEPS[_optimizer_of(operation.type)]
    settings = {key: operation.get_attr(key) for key in step.settings}
    limits = (
        operation.get_attr("clip_weight_min"),
        operation.get_attr("clip_weight_max"),
    )

    def take_step(
        gradient: tf.Tensor, rows: list[tf.Tensor], learning_rate: tf.Tensor
    ) -> list[tf.Tensor]:
        table, *slots = step.function(gradient, rows, learning_rate, **settings)
        return [tf.clip_by_value(table, *limits), *slots]

    return update(
        batches,
        named["activation_gradients"],
        [named[key] for key in ("embedding_table", *step.slots)],
        named["learning_rate"][0],
        take_step,
    )


@dataclasses.dataclass(frozen=True)
class Batch:
    """One chip's lookups, for one stack of tables.

    Attributes:
        row_pointers: int32; for each SparseCore of the chip and each
            SparseCore of all chips, where the entries of that pair end.
        sample_ids: int32 `[n]`, the sample among those of its SparseCore.
        row_ids: int32 `[n]`, the row in its shard.
        gains: float32 `[n]`.
        sparsecores: SparseCores of the chip.
    """

    row_pointers: tf.Tensor
    sample_ids: tf.Tensor
    row_ids: tf.Tensor
    gains: tf.Tensor
    sparsecores: int

    def entries(
        self, shards: int
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """SparseCore, shard, sample, row and gain of every entry, flat."""
        pointers = tf.reshape(
            self.row_pointers[: self.sparsecores * _aligned(shards)],
            [self.sparsecores, _aligned(shards)],
        )
        ends = tf.reshape(pointers[:, :shards], [-1])
        # A group begins where the one before it ended, at the next multiple
        # of 8.
        starts = _aligned(tf.concat([[0], ends[:-1]], axis=0))
        place = tf.range(tf.size(self.sample_ids))
        group = tf.searchsorted(ends, place, side="right")
        last = self.sparsecores * shards - 1
        known = tf.minimum(group, last)
        used = (group <= last) & (place >= tf.gather(starts, known))
        place = tf.boolean_mask(place, used)
        group = tf.boolean_mask(group, used)
        return (
            group // shards,
            group % shards,
            tf.gather(self.sample_ids, place),
            tf.gather(self.row_ids, place),
            tf.gather(self.gains, place),
        )


def _aligned(size: tf.Tensor | int) -> tf.Tensor | int:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def lookup(
    batches: Sequence[Batch], tables: Sequence[tf.Tensor], samples: int
) -> list[tf.Tensor]:
    """The activations of each chip, `[samples, width]`.

    Args:
        batches: One a chip.
        tables: The part of the stack on each chip, `[SparseCores * rows of a
            shard, width]`.
        samples: Rows of all features of the stack in one chip's batch.
    """
    whole, shards, rows_per_shard = _joined(batches, tables)
    activations = []
    for batch in batches:
        core, shard, sample, row, gain = batch.entries(shards)
        per_core = samples // batch.sparsecores
        checks = [
            tf.debugging.assert_less(
                row,
                rows_per_shard,
                "An id lies beyond its table: its row is not in the shard.",
            ),
            tf.debugging.assert_less(
                sample, per_core, "A sample lies beyond its SparseCore."
            ),
        ]
        with tf.control_dependencies(checks):
            rows = tf.gather(whole, shard * rows_per_shard + row)
        activations.append(
            tf.math.unsorted_segment_sum(
                rows * gain[:, tf.newaxis], core * per_core + sample, samples
            )
        )
    return activations


def update(
    batches: Sequence[Batch],
    gradients: Sequence[tf.Tensor],
    state: Sequence[Sequence[tf.Tensor]],
    learning_rate: tf.Tensor,
    take_step: Callable[..., list[tf.Tensor]],
) -> list[list[tf.Tensor]]:
    """One optimizer step on all rows that were looked up.

    Args:
        batches: One a chip.
        gradients: Of each chip's activations, `[samples, width]`.
        state: The table and its slots, each with its part on each chip.
        learning_rate: Scalar.
        take_step: `(gradient, [table rows, slot rows...], learning rate)` ->
            the rows after the step.

    Returns:
        `state` after the step.
    """
    whole, shards, rows_per_shard = _joined(batches, state[0])
    rows, parts = [], []
    for batch, gradient in zip(batches, gradients, strict=True):
        core, shard, sample, row, gain = batch.entries(shards)
        per_core = tf.shape(gradient)[0] // batch.sparsecores
        rows.append(shard * rows_per_shard + row)
        parts.append(
            tf.gather(gradient, core * per_core + sample) * gain[:, tf.newaxis]
        )
    touched, place = tf.unique(tf.concat(rows, axis=0))
    total = tf.math.unsorted_segment_sum(
        tf.concat(parts, axis=0), place, tf.size(touched)
    )
    joined = [whole, *(tf.concat(slot, axis=0) for slot in state[1:])]
    moved = take_step(
        total, [tf.gather(each, touched) for each in joined], learning_rate
    )
    return [
        tf.split(
            tf.tensor_scatter_nd_update(each, touched[:, tf.newaxis], new),
            len(batches),
        )
        for each, new in zip(joined, moved, strict=True)
    ]


def _joined(
    batches: Sequence[Batch], tables: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, int, tf.Tensor]:
    """All shards of a table, how many there are, and the rows of each."""
    whole = tf.concat(tables, axis=0)
    shards = sum(batch.sparsecores for batch in batches)
    return whole, shards, tf.shape(whole)[0] // shards


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
