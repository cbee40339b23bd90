"""What the size of a table costs a training step: the same ids in two tables.

Trains, through `model.fit`, on the same 5,000 ids in a table of 10,000 rows
and in one of 3,000,000, interleaved in one process, and prints the ratio of
the medians over rounds. A step costs what its ids cost, so the ratio stays
near 1; whatever reads or writes a whole table makes it about 100.

    python -m benchmarks.vocabulary_cost

The last line is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tf_distembed as tde

SMALL, LARGE = 10_000, 3_000_000
DIM, BATCH, IDS = 32, 500, 5_000
STEPS, ROUNDS = 30, 7


def _model(vocabulary_size: int, optimizer: str) -> keras.Model:
    table = tde.TableConfig(
        "item", vocabulary_size, DIM, initializer="zeros", optimizer=optimizer
    )
    inputs = keras.Input((None,), dtype="int64", ragged=True)
    pooled = tde.DistributedEmbedding(tde.FeatureConfig("item", table))(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(pooled))
    model.compile("sgd", "mse", jit_compile=False)
    return model


def _batches() -> tf.data.Dataset:
    random = np.random.default_rng(0)
    ids = random.integers(0, SMALL, IDS)
    lengths = np.full(BATCH, IDS // BATCH)
    ragged = tf.RaggedTensor.from_row_lengths(ids, lengths)
    return tf.data.Dataset.from_tensors((ragged, tf.ones([BATCH, 1]))).repeat()


def measure(optimizer: str) -> dict[str, float]:
    """The ratio for one optimizer, its spread, and the bytes allocated."""
    models = {size: _model(size, optimizer) for size in (SMALL, LARGE)}
    data = _batches()

    def fit(size: int) -> float:
        start = time.perf_counter()
        models[size].fit(data, steps_per_epoch=STEPS, verbose=0)
        return time.perf_counter() - start

    for size in models:
        fit(size)
    ratios = []
    for _ in range(ROUNDS):
        small, large = fit(SMALL), fit(LARGE)
        ratios.append(large / small)
    return {
        "ratio": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
    }


def main() -> None:
    result = {name: measure(name) for name in ("sgd", "adagrad", "adam")}
    for name, figures in result.items():
        print(f"{name:8s} {LARGE:,} rows / {SMALL:,} rows: {figures}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
