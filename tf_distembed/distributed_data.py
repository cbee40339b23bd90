"""`distribute_dataset`: the batches of a dataset, divided over replicas.

It returns TensorFlow's own object; it chooses the settings with which a layer
of ragged and sparse features works.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_distembed.replica_batches import rows_of

_HINT = "_tf_distembed_hint"


def distribute_dataset(
    dataset: tf.data.Dataset,
    strategy: tf.distribute.Strategy | None = None,
    *,
    pad_last_batch: bool = True,
    batch_size: int | None = None,
) -> tf.data.Dataset | tf.distribute.DistributedDataset:
    """Divides the batches of a dataset over the replicas of a strategy.

    Batches are global: of a batch of 64 each of 4 replicas gets 16 rows. Dense,
    ragged and sparse elements may be mixed, under every strategy; elements keep
    their structure, whatever it is. What is returned goes to `model.fit`,
    `evaluate` and `predict`, to the step helpers, and to a loop of one's own
    that passes `next(iterator)` to `strategy.run`.

    A last batch that is short is divided as it is: the last replicas get fewer
    rows, or none. The step helpers give the loss, the gradients and the
    metrics of one device for it. On a TPU a replica's batch has one size; there
    the helpers add empty rows and mask them out (`pad_last_batch`). Keras' own
    `fit` averages the means of the replicas, however many rows each has: give
    it datasets with `drop_remainder=True` for the loss of one device.

    Args:
        dataset: A `tf.data.Dataset` of global batches.
        strategy: The strategy; None is that in scope.
        pad_last_batch: Whether the step helpers fill up short batches on a
            TPU. If False, a short batch is an error there.
        batch_size: Rows of a whole global batch, if it is not that of the
            first batch that is read.

    Returns:
        A `tf.distribute.DistributedDataset`; without a strategy, `dataset`.

    Raises:
        TypeError: no dataset, or arguments of a wrong type.
        ValueError: a `batch_size` that the replicas cannot divide.

    Example:

    ```python
    import tensorflow as tf
    import tf_distembed as tde

    ids = tf.ragged.constant([[1, 2], [3], [], [4]], dtype=tf.int64)
    dataset = tf.data.Dataset.from_tensor_slices((ids, tf.ones((4, 1))))
    for ids, labels in tde.distribute_dataset(dataset.batch(2)):
        assert labels.shape == (2, 1)
    ```
    """
    if strategy is None:
        strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, tf.distribute.Strategy):
        raise TypeError(
            "strategy must be a tf.distribute.Strategy or None. Received: "
            f"{strategy!r} (of type {type(strategy).__name__})"
        )
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "distribute_dataset takes a tf.data.Dataset that is not yet "
            f"distributed. Received: {dataset!r} (of type "
            f"{type(dataset).__name__})"
        )
    if not isinstance(pad_last_batch, bool):
        raise TypeError(
            f"pad_last_batch must be a bool. Received: {pad_last_batch!r}"
        )
    replicas = strategy.num_replicas_in_sync
    if batch_size is not None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int):
            raise TypeError(
                f"batch_size must be an int or None. Received: {batch_size!r}"
            )
        if batch_size < 1 or batch_size % replicas:
            raise ValueError(
                "batch_size is that of the global batch and must be a positive "
                f"multiple of the {replicas} replicas. Received: {batch_size}"
            )
    options = _input_options(dataset)
    cardinality = None
    if replicas > 1 and _may_lack_sparse_rows(dataset):
        distributed = strategy.distribute_datasets_from_function(
            lambda context: _parts(dataset, context), options
        )
        # TensorFlow's would be that of the parts, which nobody knows. Where
        # it is unknown, Keras' `fit` begins a step after the last batch.
        cardinality = dataset.cardinality()
    else:
        distributed = strategy.experimental_distribute_dataset(dataset, options)
    if not isinstance(distributed, tf.distribute.DistributedDataset):
        return distributed
    rows = None if batch_size is None else batch_size // replicas
    hint = BatchHint(pad_last_batch, rows)
    return _with_hint(distributed, hint, cardinality)


@dataclasses.dataclass(frozen=True)
class BatchHint:
    """What `distribute_dataset` was told, for the step helpers.

    Attributes:
        pad: Whether a short batch may be filled up.
        rows: Rows of a replica's whole batch, if they were given.
    """

    pad: bool = True
    rows: int | None = None


def hint_of(iterator: Any) -> BatchHint:
    """The hint that came with an iterator or a dataset, or an empty one."""
    return getattr(iterator, _HINT, BatchHint())


def _with_hint(dataset: Any, hint: BatchHint, cardinality: Any) -> Any:
    """The dataset, whose iterators carry a hint from now on.

    Its number of batches is the one given, if one is. It stays TensorFlow's own
    object, of a subclass of its class: Keras asks for that class by name.
    """
    kind: Any = type(dataset)

    class DistributedDataset(kind):
        """TensorFlow's, with a hint."""

        @property
        def cardinality(self) -> Any:
            return super().cardinality if cardinality is None else cardinality

        def __iter__(self) -> Iterator[Any]:
            iterator = super().__iter__()
            setattr(iterator, _HINT, hint)
            return iterator

    dataset.__class__ = DistributedDataset
    setattr(dataset, _HINT, hint)
    return dataset


def _may_lack_sparse_rows(dataset: tf.data.Dataset) -> bool:
    """Whether a replica may get a sparse tensor of no rows."""
    return any(
        isinstance(leaf, tf.SparseTensorSpec)
        and (not leaf.shape.rank or leaf.shape[0] is None)
        for leaf in tf.nest.flatten(dataset.element_spec)
    )


def _parts(
    dataset: tf.data.Dataset, context: tf.distribute.InputContext
) -> tf.data.Dataset:
    """The parts of this process's replicas, one after the other.

    TensorFlow divides batches by the rows of what it holds for a sparse tensor,
    and cannot make one again from none of them.
    """
    everyone = context.num_replicas_in_sync
    here = everyone // context.num_input_pipelines
    first = context.input_pipeline_id * here

    def split(*element: Any) -> tf.data.Dataset:
        leaves = tf.nest.flatten(element)
        some = next(leaf for leaf in leaves if leaf is not None)
        rows = tf.cast(rows_of(some), tf.int64)
        size = (rows + everyone - 1) // everyone
        parts = []
        for replica in range(first, first + here):
            begin = tf.minimum(replica * size, rows)
            end = tf.minimum(begin + size, rows)
            part = tf.nest.pack_sequence_as(
                dataset.element_spec,
                [_rows_between(leaf, begin, end) for leaf in leaves],
            )
            parts.append(tf.data.Dataset.from_tensors(part))
        return functools.reduce(tf.data.Dataset.concatenate, parts)

    return dataset.flat_map(split)


def _rows_between(value: Any, begin: tf.Tensor, end: tf.Tensor) -> Any:
    if value is None:
        return None
    if not isinstance(value, tf.SparseTensor):
        return value[begin:end]
    rest = value.dense_shape[1:]
    return tf.sparse.slice(
        value,
        tf.concat([[begin], tf.zeros_like(rest)], 0),
        tf.concat([[end - begin], rest], 0),
    )


def _input_options(dataset: tf.data.Dataset) -> Any:
    """Ragged and sparse batches stay on the host until a replica takes them.

    TPUStrategy refuses to copy them to its devices ahead of time, and what it
    copies under MirroredStrategy Keras' `fit` cannot read.
    """
    leaves = tf.nest.flatten(dataset.element_spec)
    if all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
        return None
    return tf.distribute.InputOptions(experimental_fetch_to_device=False)
