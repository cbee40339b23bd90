"""Keras callbacks for tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from tf_distembed.state import embedding_layers

#: (epoch from 0, learning rate) -> new learning rate.
Schedule = Callable[[int, float], float]


class TableLearningRateScheduler(keras.callbacks.Callback):
    """Sets the learning rates of tables at the beginning of each epoch.

    What `keras.callbacks.LearningRateScheduler` does for the optimizer of the
    model, for the optimizers that tables have of their own. An optimizer that
    several tables share is set once. Of tables of one name in several layers,
    all are set.

    Args:
        schedule: A function (epoch from 0, learning rate) -> new learning
            rate for all tables, or a dict {table name: function} for some.
        verbose: 1 prints each new rate.

    Raises:
        TypeError: when made, if `schedule` is neither.
        ValueError: when training begins, if the model has no
            `DistributedEmbedding`, for a table that does not exist or has no
            optimizer of its own, or one whose learning rate is a
            `LearningRateSchedule` or another callable, which changes by
            itself; at an epoch, for a rate that is no float.

    Example:

    ```python
    import keras
    import numpy as np
    import tf_distembed as tde

    item = tde.TableConfig("item", 10, 4, optimizer="sgd")
    layer = tde.DistributedEmbedding(tde.FeatureConfig("item", item))
    model = keras.Sequential([keras.Input((), dtype="int64"), layer])
    model.compile("sgd", "mse")
    halve = tde.TableLearningRateScheduler(lambda epoch, rate: rate / 2)
    model.fit(
        np.arange(8), np.ones((8, 4)), epochs=2, callbacks=[halve], verbose=0
    )
    rate = layer.table_optimizers["item"].learning_rate
    assert abs(float(rate) - 0.01 / 4) < 1e-6
    ```
    """

    def __init__(
        self, schedule: Schedule | Mapping[str, Schedule], verbose: int = 0
    ) -> None:
        super().__init__()
        functions = (
            schedule.values() if isinstance(schedule, Mapping) else [schedule]
        )
        if not all(callable(function) for function in functions):
            raise TypeError(
                "schedule must be a function (epoch, learning rate) -> new "
                "learning rate, or a dict {table name: function}. Received: "
                f"{schedule!r}"
            )
        self.schedule = schedule
        self.verbose = verbose

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Raises unless every rate asked for can be set."""
        for name, optimizer in self._optimizers():
            if not isinstance(optimizer._learning_rate, keras.Variable):
                raise ValueError(
                    f"Table '{name}': its learning rate is "
                    f"{optimizer._learning_rate!r}, which changes by itself. "
                    "Give its optimizer a float, or leave the table out of "
                    "TableLearningRateScheduler."
                )

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Sets the rates of this epoch."""
        done: set[int] = set()
        for name, optimizer in self._optimizers():
            if id(optimizer) in done:
                continue
            done.add(id(optimizer))
            schedule = self.schedule
            if isinstance(schedule, Mapping):
                schedule = schedule[name]
            rate = schedule(epoch, float(optimizer.learning_rate.numpy()))
            try:
                optimizer.learning_rate = float(rate)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"Table '{name}': the schedule must return a float. "
                    f"Received: {rate!r}"
                ) from error
            if self.verbose:
                print(
                    f"Epoch {epoch + 1}: the learning rate of table '{name}' "
                    f"is {float(rate)}."
                )

    def _optimizers(self) -> list[tuple[str, Any]]:
        """(table, its optimizer) of every table that is scheduled."""
        found = [
            pair
            for layer in embedding_layers(self.model)
            for pair in layer.table_optimizers.items()
        ]
        if not isinstance(self.schedule, Mapping):
            return found
        names = {name for name, _ in found}
        unknown = sorted(set(self.schedule) - names)
        if unknown:
            raise ValueError(
                f"TableLearningRateScheduler names tables {unknown}, which do "
                "not exist or have no optimizer of their own. Those that have "
                f"are {sorted(names)}."
            )
        return [pair for pair in found if pair[0] in self.schedule]
