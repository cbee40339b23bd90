"""Backups of a training run, from which a killed process goes on.

TensorFlow's checkpoints write beside and rename, and name the newest complete
one last, so a write that is cut off leaves the one before in place.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_distembed.layer import DistributedEmbedding

KEPT = 2


class Progress(tf.train.experimental.PythonState):
    """How far a run is; travels inside the checkpoint.

    Attributes:
        epoch: The epoch that runs or comes next.
        step: Batches of that epoch that are done.
        batches: Batches that are done since the run began.
        epochs: Numbers of the epochs that have ended.
        history: name -> its values at the end of those epochs.
        variables: Names and shapes of the model's variables.
    """

    def __init__(self, variables: list[str]) -> None:
        super().__init__()
        self.epoch = 0
        self.step = 0
        self.batches = 0
        self.epochs: list[int] = []
        self.history: dict[str, list[float]] = {}
        self.variables = variables

    def serialize(self) -> str:
        """What the checkpoint holds."""
        names = ("epoch", "step", "batches", "epochs", "history", "variables")
        return json.dumps({name: getattr(self, name) for name in names})

    def deserialize(self, string_value: str | bytes) -> None:
        """Takes over what a checkpoint held."""
        found = json.loads(string_value)
        if found["variables"] != self.variables:
            theirs, ours = set(found["variables"]), set(self.variables)
            raise ValueError(
                "The backup is that of another model or optimizer. Only it "
                f"has {sorted(theirs - ours)}; only this model has "
                f"{sorted(ours - theirs)}. Use another backup_dir, or remove "
                "this one to start again."
            )
        for name, value in found.items():
            setattr(self, name, value)


class Backup:
    """Writes and reads the backups of one run.

    Args:
        model: A built model with a built optimizer.
        directory: Where they are; made if it is not there.
        strategy: The model's strategy.
    """

    def __init__(
        self,
        model: keras.Model,
        directory: str | os.PathLike[str],
        strategy: tf.distribute.Strategy,
    ) -> None:
        layers = [
            one
            for one in model._flatten_layers()
            if isinstance(one, DistributedEmbedding)
        ]
        # Tables are saved by their layers, in one form for all devices.
        saved = {id(v) for layer in layers for v in layer.variables}
        variables: list[Any] = []
        names: list[str] = []
        optimizer = type(model.optimizer).__name__
        self._rates = _learning_rates(model, layers)
        for owner, group in (
            ("model", model.variables),
            (optimizer, model.optimizer.variables),
            ("metrics", model.metrics_variables),
            ("learning rate", self._rates),
        ):
            for variable in group:
                if id(variable) in saved:
                    continue
                saved.add(id(variable))
                variables.append(variable)
                # Paths hold numbers that count the objects of a process, and
                # so do the names of an optimizer's slots.
                name = variable.name if owner == "model" else len(names)
                shape, dtype = list(variable.shape), variable.dtype
                names.append(f"{owner} {name} {shape} {dtype}")
        self.progress = Progress(names)
        self._checkpoint = tf.train.Checkpoint(
            progress=self.progress,
            tables=layers,
            variables=[variable.value for variable in variables],
        )
        directory = os.fspath(directory)
        self._restored_from = directory
        # All workers take part in reading the variables; one keeps the file.
        self._keeps = bool(strategy.extended.should_checkpoint)
        if not self._keeps:
            task = strategy.cluster_resolver.task_id
            directory = os.path.join(directory, f"worker{task}_is_not_kept")
        self._directory = directory
        self._manager = tf.train.CheckpointManager(
            self._checkpoint,
            directory,
            max_to_keep=KEPT,
            checkpoint_name="backup",
        )

    def restore(self) -> bool:
        """Goes back to the newest backup; False if there is none.

        Raises:
            ValueError: it is that of another model.
        """
        newest = tf.train.latest_checkpoint(self._restored_from)
        if newest is None:
            return False
        self._checkpoint.restore(newest).assert_consumed()
        return True

    @contextlib.contextmanager
    def rates_kept(self) -> Iterator[None]:
        """Undoes what callbacks do to the learning rates in the context."""
        before = [rate.numpy() for rate in self._rates]
        yield
        for rate, value in zip(self._rates, before, strict=True):
            rate.assign(value)

    def save(self) -> None:
        """Writes a backup; the two newest are kept."""
        self._manager.save(checkpoint_number=self.progress.batches)
        if not self._keeps:
            shutil.rmtree(self._directory, ignore_errors=True)


def _learning_rates(
    model: keras.Model, layers: list[DistributedEmbedding]
) -> list[Any]:
    """Variables that hold a learning rate, of the model and of its tables."""
    optimizers = [
        getattr(model.optimizer, "inner_optimizer", model.optimizer),
        *(
            optimizer
            for layer in layers
            for optimizer in layer.table_optimizers.values()
        ),
    ]
    rates = {id(one): one._learning_rate for one in optimizers}
    return [rate for rate in rates.values() if isinstance(rate, keras.Variable)]
