"""Any ids, weights and row lengths give what the reference gives.

Each test draws batches for one layer whose training step is traced once. A
batch goes through everything: outputs, gradients to rows and to weights, one
Adagrad step on the touched rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.batches import make_batch, signature_of
from tests.conformance.cases import Case, Feature, Layer, Table
from tests.conformance.comparison import mismatches
from tests.conformance.layers import make_layer
from tests.conformance.reference import Reference, Result
from tests.conformance.registry import OPTIMIZERS
from tests.conformance.runners import training_step

VOCABULARY = 6
DIM = 3
WIDTH = 3

#: Combined as it is, cut to two ids, and one row a position.
TABLES = (
    Table("all", VOCABULARY, DIM, "mean"),
    Table("cut", VOCABULARY, DIM, "sqrtn"),
    Table("positions", VOCABULARY, DIM, "sum"),
)


def features_of(kind: str) -> tuple[Feature, ...]:
    """Three features without data, which each example adds."""
    shapes = {
        "all": {},
        "cut": {"input_shape": (None, 2)},
        "positions": {"output_shape": (None, 2, DIM)},
    }
    if kind == "dense":
        # It cannot be cut; an empty batch has a width all the same.
        shapes = {
            name: {**shape, "input_shape": (None, WIDTH)}
            for name, shape in shapes.items()
        }
    return tuple(
        Feature(
            name,
            name,
            kind,
            ids=(),
            weights=(),
            invalid_ids="drop",
            weights_gradient=True,
            columns=2**40,
            **shape,
        )
        for name, shape in shapes.items()
    )


class TracedLayer:
    """A layer of one kind of input, its step traced, fed by the examples."""

    def __init__(self, kind: str):
        self.features = features_of(kind)
        layer = self._layer([], [], 0)
        self.embedding = make_layer(layer, "adagrad")
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(self.embedding.trainable_variables)
        self.traces = 0
        step = training_step(
            layer, self.embedding, optimizer, sees_gradients=True
        )

        def counted(batch):
            self.traces += 1
            return step(batch)

        self.step = tf.function(
            counted, input_signature=[signature_of(layer, None)]
        )

    def _layer(self, ids: Sequence, weights: Sequence, rows: int) -> Layer:
        features = tuple(
            dataclasses.replace(f, ids=(ids,), weights=(weights,))
            for f in self.features
        )
        case = Case("drawn", "", TABLES, features, (), batches=(rows,))
        return Layer("", (case,), (rows,), {}, OPTIMIZERS["adagrad"])

    def check(self, ids: Sequence, weights: Sequence, rows: int) -> None:
        """One step on this batch, from the initial tables, as by the rules."""
        layer = self._layer(ids, weights, rows)
        (case,) = layer.cases
        self.embedding.set_embedding_tables(
            {t.name: t.initial_values() for t in TABLES}, reset_slots=True
        )
        found = tf.nest.map_structure(
            np.asarray, self.step(make_batch(layer, 0, range(rows)))
        )
        state = self.embedding.get_optimizer_state()
        got = Result(
            outputs=[found["outputs"]],
            table_gradients=[found["tables"]],
            weights_gradients=[found["weights"]],
            tables=self.embedding.get_embedding_tables(),
            slots=state,
            steps={name: slots["step"] for name, slots in state.items()},
        )
        wrong = mismatches(got, Reference(OPTIMIZERS).run(case, "adagrad"))
        assert not wrong, "\n".join(wrong)
        assert self.traces == 1


@pytest.fixture(scope="module")
def ragged() -> TracedLayer:
    return TracedLayer("ragged")


@pytest.fixture(scope="module")
def sparse() -> TracedLayer:
    return TracedLayer("sparse")


@pytest.fixture(scope="module")
def dense() -> TracedLayer:
    return TracedLayer("dense")


IDS = st.integers(-2, VOCABULARY + 1) | st.sampled_from(
    [2**31, 2**32 + 1, 2**63 - 1, -(2**63), VOCABULARY - 1]
)
WEIGHTS = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0])


def rows_of(lengths: st.SearchStrategy) -> st.SearchStrategy:
    """Batches as rows of (id, weight), of lengths drawn from `lengths`."""
    row = lengths.flatmap(
        lambda n: st.lists(st.tuples(IDS, WEIGHTS), min_size=n, max_size=n)
    )
    return st.lists(row, max_size=5)


def split(rows: Sequence) -> tuple[list, list]:
    return tuple([[pair[i] for pair in row] for row in rows] for i in (0, 1))


@settings(max_examples=500)
@given(rows=rows_of(st.integers(0, 5)))
def test_ragged_batches(ragged, rows):
    ragged.check(*split(rows), len(rows))


@settings(max_examples=250)
@given(rows=rows_of(st.just(WIDTH)))
def test_dense_batches(dense, rows):
    dense.check(*split(rows), len(rows))


@settings(max_examples=250)
@given(
    cells=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 2) | st.integers(0, 2**40 - 1),
            IDS,
            WEIGHTS,
        ),
        max_size=12,
    )
)
def test_sparse_batches_in_any_order(sparse, cells):
    sparse.check([c[:3] for c in cells], [c[3] for c in cells], 4)
