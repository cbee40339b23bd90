"""Sum, mean and sqrtn: outputs, gradients, second derivatives, both bodies.

The rows of a call, and bags of three examples, the second one empty:

    rows    r0 r1 r2 r3
    places  2 0 2 | - | 1          outputs [3, D]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tf_distembed import combiners, sparse_product
from tf_distembed.bags import Bags

COMBINERS = ("sum", "mean", "sqrtn")
DIM = 3
Lists = list[list[int]]
Weights = list[list[float]]


@dataclasses.dataclass(frozen=True)
class Case:
    """Places of one feature, example by example."""

    places: Lists
    weights: Weights | None = None


CASES = {
    "empty rows": Case([[], [2, 0, 2], [], [1], []]),
    "no ids": Case([[], []]),
    "no ids, weights": Case([[], []], [[], []]),
    "no rows": Case([]),
    "one each": Case([[3], [3], [0]]),
    "weights": Case(
        [[2, 0, 2], [], [1, 3], []], [[1.0, -0.5, 2.0], [], [0.25, 3.0], []]
    ),
    "weights of zero": Case(
        [[1], [2, 2], [0, 3], [3]],
        [[0.0], [0.0, 0.0], [0.0, 2.0], [1.0]],
    ),
    "weights that cancel": Case([[1, 2], [0]], [[1.0, -1.0], [-2.0]]),
    "negative weights": Case([[1, 2, 3]], [[-1.0, -2.0, 0.5]]),
}


@pytest.fixture(autouse=True, params=[True, False], ids=["product", "segments"])
def _form(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, and as on a GPU or for another dtype."""
    monkeypatch.setattr(sparse_product, "is_fast", lambda dtype: request.param)


def rows_of(count: int = 4) -> np.ndarray:
    """Row and column can be read off each value."""
    grid = np.arange(1, count + 1)[:, None] + np.arange(DIM)[None, :] / 8
    return grid.astype(np.float32)


def bags_of(
    case: Case, weights: tf.Tensor | None, *, masked: bool = False
) -> tuple[tf.Tensor, Bags]:
    """(places, bags); masked, with absent ids put in between."""
    places, bag, present = [], [], []
    for example, own in enumerate(case.places):
        for place in own:
            places.append(place)
            bag.append(example)
            present.append(True)
            if masked:
                places.append(0)
                bag.append(example)
                present.append(False)
    if masked and weights is not None:
        both = tf.stack([weights, tf.fill(tf.shape(weights), 7.0)], 1)
        weights = tf.reshape(both, [-1])
    return tf.constant(places, tf.int32), Bags(
        ids=tf.constant(places, tf.int32),
        bag=tf.constant(bag, tf.int32),
        num_bags=tf.constant(len(case.places), tf.int32),
        weights=weights,
        present=tf.constant(present, tf.bool) if masked else None,
        one_each=False,
        leading_shape=[len(case.places)],
        dropped=None,
    )


def flat_weights(case: Case) -> tf.Tensor | None:
    if case.weights is None:
        return None
    return tf.constant([w for own in case.weights for w in own], tf.float32)


def by_hand(
    case: Case, combiner: str, rows: Any, weights: tf.Tensor | None
) -> tf.Tensor:
    """Bag by bag, from plain differentiable operations."""
    outputs, start = [], 0
    for own in case.places:
        e = tf.matmul(tf.one_hot(np.array(own, int), rows.shape[0]), rows)
        w = tf.ones([len(own)])
        if weights is not None:
            w = weights[start : start + len(own)]
        start += len(own)
        total = {
            "sum": lambda w=w: tf.constant(1.0),
            "mean": lambda w=w: tf.reduce_sum(w),
            "sqrtn": lambda w=w: tf.sqrt(tf.reduce_sum(w**2)),
        }[combiner]
        if not own or float(total()) == 0:
            outputs.append(tf.reduce_sum(0.0 * rows, 0))
        else:
            outputs.append(tf.reduce_sum(w[:, None] * e, 0) / total())
    return tf.stack(outputs) if outputs else tf.zeros([0, DIM])


def derivatives(
    pooled: Callable[[tf.Tensor, Any], tf.Tensor], weights: tf.Tensor | None
) -> list[Any]:
    """Output, first derivatives, and second ones of what depends on them."""
    rows = tf.constant(rows_of())
    inputs = [rows] if weights is None else [rows, weights]
    coefficients = tf.constant(np.linspace(-1, 2, DIM), tf.float32)
    with tf.GradientTape() as outer:
        outer.watch([*inputs, coefficients])
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = pooled(rows, weights)
            loss = tf.reduce_sum((output * coefficients) ** 2)
        first = [
            tf.convert_to_tensor(gradient)
            for gradient in tape.gradient(
                loss,
                inputs,
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
        ]
        penalty = tf.add_n([tf.reduce_sum(g**2) for g in first])
    second = outer.gradient(
        penalty,
        [*inputs, coefficients],
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    return [output, *first, *map(tf.convert_to_tensor, second)]


@pytest.mark.parametrize("masked", [False, True], ids=["segments", "masked"])
@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_derivatives(
    name: str, combiner: str, masked: bool
) -> None:
    case = CASES[name]

    def pooled(rows: tf.Tensor, weights: tf.Tensor | None) -> tf.Tensor:
        places, bags = bags_of(case, weights, masked=masked)
        return combiners.pool(rows, [places], [bags], [combiner])[0]

    weights = flat_weights(case)
    expected = derivatives(
        lambda rows, weights: by_hand(case, combiner, rows, weights), weights
    )
    _assert_close(derivatives(pooled, weights), expected)
    if combiner == "mean" and name in ("empty rows", "weights"):
        run = tf.function(lambda: derivatives(pooled, weights))
        _assert_close(run(), expected)


def _assert_close(found: list[tf.Tensor], expected: list[tf.Tensor]) -> None:
    for place, (got, right) in enumerate(zip(found, expected, strict=True)):
        # Second derivatives of what divides a sum may nearly cancel.
        size = 1e-6 * np.abs(right).max(initial=1)
        np.testing.assert_allclose(
            got, right, rtol=2e-4, atol=2e-4 + size, err_msg=str(place)
        )


def test_features_of_one_call_do_not_mix() -> None:
    """Alike ones are pooled by one operation, and come back in order."""
    names = list(CASES) * 2
    chosen = [COMBINERS[n % 3] for n in range(len(names))]
    rows = tf.constant(rows_of())
    given = [bags_of(CASES[n], flat_weights(CASES[n])) for n in names]
    outputs = combiners.pool(
        rows, [places for places, _ in given], [b for _, b in given], chosen
    )
    for name, combiner, output in zip(names, chosen, outputs, strict=True):
        right = by_hand(CASES[name], combiner, rows, flat_weights(CASES[name]))
        np.testing.assert_allclose(output, right, 1e-5, 1e-6)


def test_bags_of_one_are_picked() -> None:
    case = CASES["one each"]
    places, bags = bags_of(case, None)
    bags = dataclasses.replace(bags, one_each=True)
    rows = tf.constant(rows_of())
    with tf.GradientTape() as tape:
        tape.watch(rows)
        output = combiners.pool(rows, [places], [bags], ["mean"])[0]
        loss = tf.reduce_sum(output)
    np.testing.assert_array_equal(output, rows_of()[[3, 3, 0]])
    np.testing.assert_array_equal(tape.gradient(loss, rows)[:, 0], [1, 0, 0, 2])


@pytest.mark.parametrize("combiner", COMBINERS)
def test_no_row_of_an_absent_id_leaks(combiner: str) -> None:
    """Under XLA, row 0 stands in the place of a dropped id; even a NaN."""
    values = rows_of()
    values[0] = np.nan
    case = Case([[2, 1], [3], []], [[1.0, 2.0], [0.5], []])
    for weights in (None, flat_weights(case)):
        rows = tf.constant(values)
        places, bags = bags_of(case, weights, masked=True)
        with tf.GradientTape() as tape:
            tape.watch(rows)
            output = combiners.pool(rows, [places], [bags], [combiner])[0]
            loss = tf.reduce_sum(output**2)
        gradient = tf.convert_to_tensor(tape.gradient(loss, rows))
        assert np.all(np.isfinite(output))
        assert np.all(np.isfinite(gradient))
        np.testing.assert_array_equal(gradient[0], 0)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_rows_without_any(combiner: str) -> None:
    """A batch whose bags are all empty has no distinct row either."""
    places, bags = bags_of(CASES["no ids"], None)
    rows = tf.zeros([0, DIM])
    with tf.GradientTape() as tape:
        tape.watch(rows)
        output = combiners.pool(rows, [places], [bags], [combiner])[0]
        loss = tf.reduce_sum(output)
    np.testing.assert_array_equal(output, np.zeros([2, DIM]))
    assert tape.gradient(loss, rows).shape == (0, DIM)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_a_feature_without_any_id_adds_nothing_to_the_others(
    combiner: str,
) -> None:
    """TensorFlow's own gradient is then whatever the memory held before."""
    table = tde.TableConfig("t", 64, 16, optimizer="sgd", combiner=combiner)
    layer = tde.DistributedEmbedding(
        {
            "next": tde.FeatureConfig("next", table),
            "seen": tde.FeatureConfig("seen", table),
        }
    )
    some = tf.constant(np.arange(64))
    ids = {
        "next": some,
        "seen": tf.RaggedTensor.from_row_lengths(some[:0], [0]),
    }
    for _ in range(5):
        # Leave memory of the gradient's size behind.
        junk = [tf.random.normal([64, 16]) * 1e6 for _ in range(8)]
        del junk
        with tf.GradientTape() as tape:
            outputs = layer(ids, training=True)
            loss = tf.reduce_sum(outputs["next"]) + tf.reduce_sum(
                outputs["seen"]
            )
        gradient = tape.gradient(loss, layer.trainable_variables)[0]
        np.testing.assert_array_equal(tf.convert_to_tensor(gradient), 1)
