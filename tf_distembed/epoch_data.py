"""The batches of each epoch, for `fit`, from any position on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_distembed.distributed_data import distribute_dataset
from tf_distembed.step_losses import class_weights


class EpochData:
    """A dataset, or one for each epoch, distributed when it is iterated."""

    def __init__(
        self,
        dataset: Any,
        strategy: tf.distribute.Strategy,
        class_weight: dict[int, float] | None,
        goes_on: bool,
    ) -> None:
        kinds = (tf.data.Dataset, tf.distribute.DistributedDataset)
        if not isinstance(dataset, kinds) and not callable(dataset):
            raise TypeError(
                "fit takes a tf.data.Dataset of batches, what "
                "tde.distribute_dataset returned, or a function epoch -> "
                f"dataset. Received: {dataset!r} (of type "
                f"{type(dataset).__name__})"
            )
        self._of: Callable[[int], Any] = (
            (lambda epoch: dataset) if isinstance(dataset, kinds) else dataset
        )
        self._is_one = isinstance(dataset, kinds)
        self._strategy = strategy
        self._class_weight = class_weight
        self._goes_on = goes_on
        self._iterator: Any = None
        self._skip = 0
        self._distributed: Any = None

    def _dataset(self, epoch: int) -> Any:
        dataset = self._of(epoch)
        if self._class_weight is not None:
            if not isinstance(dataset, tf.data.Dataset):
                raise ValueError(
                    "class_weight needs a tf.data.Dataset that is not "
                    "distributed yet: give it to fit as it is. Received: "
                    f"{dataset!r}"
                )
            dataset = dataset.map(self._with_class_weights)
        return dataset

    def _with_class_weights(self, *element: Any) -> Any:
        if len(element) != 2:
            raise ValueError(
                "class_weight needs elements (x, y); with sample weights, "
                f"multiply these. Received: {len(element)} parts."
            )
        assert self._class_weight is not None
        x, y = element
        return x, y, class_weights(y, self._class_weight)

    def first_spec(self, epoch: int) -> Any:
        """Specification of the elements."""
        return self._dataset(epoch).element_spec

    def number_of_batches(self, epoch: int) -> int | None:
        """How many batches an epoch has, if that is known."""
        cardinality = self._dataset(epoch).cardinality
        count = int(cardinality() if callable(cardinality) else cardinality)
        return count if count >= 0 else None

    def go_to(self, initial_epoch: int, epoch: int, batches: int) -> None:
        """Takes the position of a run that is restored."""
        if self._goes_on:
            self._skip = batches
            return
        if self._is_one:
            # Each iterator moves a reshuffling dataset on by one epoch.
            for _ in range(initial_epoch, epoch):
                iter(self._whole(epoch))

    def _whole(self, epoch: int) -> Any:
        """The distributed dataset of an epoch."""
        if self._is_one and self._distributed is not None:
            return self._distributed
        dataset = self._dataset(epoch)
        if isinstance(dataset, tf.data.Dataset):
            dataset = distribute_dataset(dataset, self._strategy)
        self._distributed = dataset
        return dataset

    def iterator(self, epoch: int, done: int = 0) -> Any:
        """An iterator over the batches of an epoch that are not done."""
        skip = self._skip if self._goes_on else done
        if self._goes_on and self._iterator is not None:
            return self._iterator
        self._iterator = iter(self._whole(epoch))
        for _ in range(skip):
            self._iterator.get_next()
        return self._iterator
