"""A training run that is killed at random times and goes on.

    python -m tests.resumed_run STRATEGY DIRECTORY KILLS

Each try is a process of its own, forked before TensorFlow has started: it goes
on from the last backup, trains, and writes what is left at the end. Beside it
stands what an uninterrupted run leaves.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tf_distembed as tde
from tests import data_autotuning
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
    validate: bool = True,
) -> dict[str, Any]:
    """Trains; what is left."""
    with strategy.scope():
        model = make()
    history = tde.fit(
        model,
        data(),
        epochs=epochs,
        validation_data=setup.dataset(ROWS, GLOBAL) if validate else None,
        backup_dir=backup_dir,
        save_freq=EVERY,
        callbacks=callbacks,
        verbose=0,
    )
    left = {f"history/{k}": v for k, v in history.history.items()}
    left["epochs"] = history.epoch
    return left | setup.model_state(model)


class Slowly(keras.callbacks.Callback):
    """So that most kills hit the training, not the tracing before it."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Waits."""
        time.sleep(0.2)


def run(name: str, backup_dir: str, result: Path) -> None:
    """Runs to the end, if it is not killed."""
    tf.config.experimental.enable_op_determinism()
    data_autotuning.turn_off()
    tde.testing.prepare(2)
    with setup.under(name) as strategy:
        # Without validation, which takes most of a run to trace.
        left = train(
            strategy,
            backup_dir or None,
            callbacks=[Slowly()],
            validate=False,
        )
    beside = result.with_suffix(".writing.npz")
    np.savez(beside, **{k.replace("/", "|"): v for k, v in left.items()})
    os.replace(beside, result)


def in_a_process(name: str, backup_dir: str, result: Path) -> int:
    """Starts a run; its process's number."""
    child = os.fork()
    if child:
        return child
    # Whatever happens: a child must not go on as its parent.
    try:
        run(name, backup_dir, result)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ends(child: int, seconds: float) -> bool:
    """Kills a run that takes longer; whether it ended by itself.

    Raises:
        RuntimeError: it ended with an error.
    """
    until = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended and status:
            raise RuntimeError(f"A run ended with status {status}.")
        if ended:
            return True
        if time.monotonic() > until:
            break
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main(name: str, directory: str, kills: int) -> None:
    """Writes whole.npz and killed.npz, and prints what the kills left."""
    whole, killed, backups = (
        Path(directory, one) for one in ("whole.npz", "killed.npz", "backups")
    )
    began = time.monotonic()
    ends(in_a_process(name, "", whole), 500)
    lasts = time.monotonic() - began
    draw = random.Random(20240229)
    left: set[str] = set()
    while not (kills <= 0 and killed.exists()):
        if killed.exists():
            # It was quicker than the next kill: begin once more.
            killed.unlink()
            shutil.rmtree(backups)
        seconds = draw.uniform(0.3, 1.0) * lasts if kills > 0 else 500
        if not ends(in_a_process(name, str(backups), killed), seconds):
            kills -= 1
            left |= {file.name for file in backups.glob("*")}
    print(f"{lasts:.1f} s a run; backups left: {sorted(left)}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
