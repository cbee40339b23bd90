"""Every case of the registry in a tf.function on one device.

There it also equals tf.nn.embedding_lookup_sparse, outputs and gradients, on
every case that TensorFlow's function accepts. It accepts no id outside the
table and no cut, and knows no output that is not reduced; it gives no rows
after the last id, where ours are zeros; and with sqrtn it gives NaN as the
gradient to weights whose squares sum to zero.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.conformance.cases import DEFAULT_DEVICE, Case, output_gradient
from tests.conformance.checks import cases_of, check
from tests.conformance.comparison import TOLERANCE
from tests.conformance.reference import Reference
from tests.conformance.registry import CASES


@pytest.mark.parametrize("case", cases_of(DEFAULT_DEVICE))
def test_case_equals_the_reference(case, run_of):
    check(DEFAULT_DEVICE, case, run_of)


def accepted(case: Case) -> bool:
    return not case.only_compiled and all(
        f.positions is None and _takes_all_ids(case, f) for f in case.features
    )


def _takes_all_ids(case: Case, feature) -> bool:
    table = case.table(feature.table)
    bags = Reference({}).bags(feature, table, 0, case.batches[0])
    return sum(map(len, bags)) == len(feature.uses(0))


ACCEPTED = [case for case in CASES if accepted(case)]


def looked_up(case: Case, feature, table: tf.Variable, weights):
    """TensorFlow's output, with zeros after the last row that has an id."""
    uses = Reference({}).in_order(feature, feature.uses(0))
    cells = np.array([(use.row, use.column) for use in uses], np.int64)
    shape = [case.batches[0], feature.columns]

    def sparse(values):
        return tf.SparseTensor(cells.reshape(-1, 2), values, shape)

    ids = sparse(tf.constant([use.id for use in uses], tf.int64))
    if weights is not None:
        weights = sparse(tf.gather(weights, [use.index for use in uses]))
    output = tf.nn.embedding_lookup_sparse(
        table, ids, weights, combiner=case.table(feature.table).combiner
    )
    missing = case.batches[0] - tf.shape(output)[0]
    return tf.pad(output, [[0, missing], [0, 0]])


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.name)
def test_case_equals_embedding_lookup_sparse(case, run_of):
    tables = {
        t.name: tf.Variable(t.initial_values(), dtype=tf.float32)
        for t in case.tables
    }
    weights = {
        f.name: tf.constant([use.weight for use in f.uses(0)], tf.float32)
        for f in case.features
        if f.weights is not None
    }
    outputs = {}
    loss = tf.constant(0.0)
    with tf.GradientTape() as tape:
        tape.watch(weights)
        for f in case.features:
            output = looked_up(case, f, tables[f.table], weights.get(f.name))
            outputs[f.name] = output
            if f.in_loss:
                gradient = output_gradient(
                    f, 0, case.batches[0], case.table(f.table).dim
                )
                loss += tf.reduce_sum(output * gradient.astype("float32"))
    to_tables, to_weights = tape.gradient(
        loss,
        (tables, weights),
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )

    run = run_of("default_device", case.layer)
    for name, output in outputs.items():
        _close(run.outputs[0][name], output, f"output of {name}")
    for table in case.tables:
        if table.trainable:
            _close(
                run.table_gradients[0][table.name],
                tf.convert_to_tensor(to_tables[table.name]),
                f"gradient to {table.name}",
            )
    for f in case.features:
        if f.weights_gradient:
            _close(
                run.weights_gradients[0][f.name],
                tf.convert_to_tensor(to_weights[f.name]),
                f"gradient to the weights of {f.name}",
            )


def _close(got, expected, what):
    np.testing.assert_allclose(
        got, expected, TOLERANCE, TOLERANCE, err_msg=what
    )


def test_most_cases_are_accepted():
    reduced = [
        case
        for case in CASES
        if all(f.positions is None for f in case.features)
        and DEFAULT_DEVICE in case.backends
    ]
    assert len(ACCEPTED) > 0.7 * len(reduced)
    combiners = {t.combiner for case in ACCEPTED for t in case.tables}
    assert combiners == {"sum", "mean", "sqrtn"}
