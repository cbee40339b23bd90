"""The reference itself: its gradients are derivatives of its outputs.

Its optimizer formulas named after Keras optimizers are compared with Keras,
on tables of which every row is touched, where lazy and dense are the same.
"""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conformance import registry
from tests.conformance.cases import Case, output_gradient
from tests.conformance.layers import make_optimizer
from tests.conformance.reference import Reference


def first_step(case: Case) -> Case:
    return dataclasses.replace(case, batches=case.batches[:1])


def loss(case: Case, values: dict[str, np.ndarray]) -> float:
    result = Reference(registry.OPTIMIZERS).run(case, "sgd", values)
    return sum(
        np.sum(
            result.outputs[0][f.name]
            * output_gradient(f, 0, case.batches[0], case.table(f.table).dim)
        )
        for f in case.features
        if f.in_loss
    )


@pytest.mark.parametrize("case", registry.CASES, ids=lambda case: case.name)
def test_gradients_are_the_derivatives_of_the_loss(case):
    case = first_step(case)
    values = {t.name: t.initial_values() for t in case.tables}
    draw = np.random.default_rng(0)
    result = Reference(registry.OPTIMIZERS).run(case, "sgd", values)
    for name, gradient in result.table_gradients[0].items():
        direction = draw.normal(size=gradient.shape)
        size = 1e-3
        up = {**values, name: values[name] + size * direction}
        down = {**values, name: values[name] - size * direction}
        slope = (loss(case, up) - loss(case, down)) / (2 * size)
        # The loss is linear in the tables: no error but rounding.
        np.testing.assert_allclose(slope, np.sum(gradient * direction), 1e-7)


def with_weights(case: Case, name: str, change: np.ndarray) -> Case:
    """The case with `change` added to the weights a feature is fed."""

    def changed(feature):
        if feature.name != name:
            return feature
        weights = [
            use.weight + c
            for use, c in zip(feature.uses(0), change, strict=True)
        ]
        if feature.kind != "sparse":
            lengths = [len(row) for row in feature.ids[0]]
            weights = np.split(weights, np.cumsum(lengths)[:-1])
        return dataclasses.replace(feature, weights=(weights,))

    return dataclasses.replace(
        case, features=tuple(changed(f) for f in case.features)
    )


WEIGHTS_GRADIENTS = [
    (case, f.name)
    for case in registry.CASES
    for f in case.features
    if f.weights_gradient
]


@pytest.mark.parametrize(
    "case, feature", WEIGHTS_GRADIENTS, ids=lambda x: getattr(x, "name", x)
)
def test_gradients_to_weights_are_the_derivatives_of_the_loss(case, feature):
    case = first_step(case)
    values = {t.name: t.initial_values() for t in case.tables}
    run = Reference(registry.OPTIMIZERS).run(case, "sgd", values)
    gradient = run.weights_gradients[0][feature]
    fed = next(f for f in case.features if f.name == feature)
    table = case.table(fed.table)
    # Where a denominator is zero the output jumps and has no derivative.
    smooth = np.zeros(len(gradient), bool)
    bags = Reference({}).bags(fed, table, 0, case.batches[0])
    for bag in bags:
        for _, uses in Reference({}).groups(fed, bag):
            weights = np.array([use.weight for use in uses])
            if Reference({}).denominator(weights, table.combiner) != 0:
                smooth[[use.index for use in uses]] = True
    assert smooth.any()
    size = 1e-5
    for i in range(len(gradient)):
        if not smooth[i]:
            assert gradient[i] == 0
            continue
        change = np.zeros(len(gradient))
        change[i] = size
        slope = (
            loss(with_weights(case, feature, change), values)
            - loss(with_weights(case, feature, -change), values)
        ) / (2 * size)
        np.testing.assert_allclose(slope, gradient[i], 1e-6, 1e-6)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, optimizer in registry.OPTIMIZERS.items()
        if optimizer.maker in ("keras", "name")
    ],
)
def test_formulas_are_those_of_keras(name):
    optimizer = registry.OPTIMIZERS[name]
    theirs = keras.optimizers.get(make_optimizer(name))
    draw = np.random.default_rng(1)
    values = draw.normal(size=(5, 3))
    slots = {
        slot: np.full(values.shape, start)
        for slot, start in optimizer.slots.items()
    }
    variable = keras.Variable(values.astype("float32"))
    reference = Reference(registry.OPTIMIZERS)
    for t in range(1, 5):
        gradient = draw.normal(size=values.shape)
        reference.update(optimizer, values, slots, list(range(5)), gradient, t)
        theirs.apply([tf.constant(gradient, tf.float32)], [variable])
        np.testing.assert_allclose(variable.numpy(), values, 2e-5, 2e-6)
    for slot, value in slots.items():
        found = next(v for v in theirs.variables if v.path.endswith(slot))
        np.testing.assert_allclose(found.numpy(), value, 2e-5, 2e-6)
