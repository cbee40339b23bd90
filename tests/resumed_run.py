"""A training run in a process of its own, which may be killed at any time.

    python -m tests.resumed_run STRATEGY BACKUP_DIR RESULT_FILE

It trains and writes what is left at the end. Started again with the same
arguments, it goes on from its last backup.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tf_distembed as tde
from tests import training_setup as setup

ROWS, GLOBAL, EPOCHS, EVERY = 40, 8, 4, 2


class Model(setup.Model):
    """With dropout, whose random state goes on too."""

    def __init__(self, embedding: keras.layers.Layer) -> None:
        super().__init__(embedding)
        self.dropout = keras.layers.Dropout(0.2, seed=4)

    def call(self, inputs: Any, training: bool = False) -> tf.Tensor:
        """Looks up, drops out, one dense layer."""
        ids, weights = inputs
        found = self.embedding(ids, weights)
        joined = self.concatenate([found[k] for k in sorted(found)])
        return self.head(self.dropout(joined, training=training))


def make() -> Model:
    keras.utils.set_random_seed(3)
    model = Model(setup.layer(GLOBAL))
    model.compile(
        keras.optimizers.Adam(
            keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.9)
        ),
        "mse",
        metrics=["mae"],
        jit_compile=False,
    )
    return model


def data() -> tf.data.Dataset:
    elements = tf.data.Dataset.from_tensor_slices(setup.arrays(ROWS))
    return elements.shuffle(ROWS, seed=7).batch(GLOBAL, drop_remainder=True)


def train(
    strategy: tf.distribute.Strategy,
    backup_dir: str | None,
    epochs: int = EPOCHS,
    callbacks: Any = None,
) -> dict[str, Any]:
    """Trains; what is left."""
    with strategy.scope():
        model = make()
    history = tde.fit(
        model,
        data(),
        epochs=epochs,
        validation_data=setup.dataset(ROWS, GLOBAL),
        backup_dir=backup_dir,
        save_freq=EVERY,
        callbacks=callbacks,
        verbose=0,
    )
    left = {f"history/{k}": v for k, v in history.history.items()}
    left["epochs"] = history.epoch
    return left | setup.model_state(model)


def main(name: str, backup_dir: str, result_file: str) -> None:
    """Runs to the end, if it is not killed."""
    tf.config.experimental.enable_op_determinism()
    tde.testing.prepare(2)
    context: Any = contextlib.nullcontext(tf.distribute.get_strategy())
    if name == "emulator":
        context = tde.testing.sparsecore_emulator(2)
    with context as strategy:
        left = train(strategy, backup_dir or None)
    beside = result_file + ".writing.npz"
    np.savez(beside, **{k.replace("/", "|"): v for k, v in left.items()})
    os.replace(beside, result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
