"""The operations chosen for GPUs give what those for CPUs give.

Both are run here on a CPU, which has all of them.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tf_distembed.backends import compilation

IDS = [[3, 1, 3], [], [0], [], [4, 3, 2, 2], []]
ROWS = tf.ragged.constant(IDS, dtype=tf.int64)
WEIGHTS = tf.ragged.constant(
    [[float(place + 1) for place, _ in enumerate(row)] for row in IDS]
)
# Of tables with few and with many columns, and of two stacks.
WIDTHS = {"narrow": 4, "narrow_too": 4, "wide": 40, "other": 4}


def train(combiner: str) -> dict[str, Any]:
    keras.utils.set_random_seed(0)
    features, inputs, weights = {}, {}, {}
    for name, dim in WIDTHS.items():
        optimizer = "sgd" if name == "other" else "adagrad"
        table = tde.TableConfig(
            name, 5, dim, optimizer=optimizer, combiner=combiner
        )
        for kind, ids in {
            "ragged": ROWS,
            "weighted": ROWS,
            "sparse": ROWS.to_sparse(),
            "one": tf.constant([4, 3, 3, 0, 1, 4]),
            "none": tf.RaggedTensor.from_row_lengths(
                tf.zeros([0], tf.int64), [0] * 6
            ),
        }.items():
            feature = f"{name}_{kind}"
            features[feature] = tde.FeatureConfig(feature, table)
            inputs[feature] = ids
            weights[feature] = WEIGHTS if kind == "weighted" else None
    layer = tde.DistributedEmbedding(features)
    optimizer = keras.optimizers.SGD(1.0)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            outputs = layer(inputs, weights, training=True)
            loss = tf.add_n([tf.reduce_sum(x**2) for x in outputs.values()])
        variables = layer.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return outputs

    optimizer.build(layer.trainable_variables)
    first = step()
    second = step()
    return {
        "first outputs": first,
        "second outputs": second,
        "outputs at inference": layer(inputs, weights),
        "tables": layer.get_embedding_tables(),
        "slots": layer.get_optimizer_state(),
    }


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_outputs_and_updates_are_equal(
    combiner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = train(combiner)
    monkeypatch.setattr(compilation, "has_gpu", lambda: True)
    on_gpu = train(combiner)
    tf.nest.map_structure(
        lambda one, other: np.testing.assert_allclose(
            one, other, rtol=1e-4, atol=1e-5
        ),
        on_cpu,
        on_gpu,
    )
    moved = on_cpu["second outputs"]["wide_one"]
    assert np.abs(moved - on_cpu["first outputs"]["wide_one"]).max() > 1e-4
