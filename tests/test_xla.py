"""`jit_compile=True`: the same rows, outputs and slots as without.

XLA reads row 0 for the id -1 and the last row for an id beyond it, raises
nothing, and needs shapes that do not depend on ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests import dense_reference as ref

K = keras.optimizers
native = tf.tpu.experimental.embedding
Schedule = K.schedules.ExponentialDecay


def jit(step: Callable) -> Callable:
    return tf.function(step, jit_compile=True)


RULES: dict[str, Callable[[], Any]] = {
    "sgd": lambda: K.SGD(0.1),
    "momentum": lambda: K.SGD(0.1, momentum=0.9),
    "nesterov": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: K.Adagrad(0.1),
    "adam": lambda: K.Adam(0.05),
    "ftrl": lambda: K.Ftrl(0.1, l1_regularization_strength=0.01, beta=0.1),
    "schedule": lambda: K.Adam(Schedule(0.1, 1, 0.5)),
    "native_sgd": lambda: native.SGD(0.1),
    "native_adagrad": lambda: native.Adagrad(0.1),
    "native_adagrad_momentum": lambda: native.AdagradMomentum(0.1, 0.9),
    "native_adam": lambda: native.Adam(0.05),
    "native_ftrl": lambda: native.FTRL(0.1),
    "none": lambda: None,
}


def _values(rows: int, dim: int) -> np.ndarray:
    return (
        np.arange(1, rows * dim + 1, dtype=np.float32).reshape(rows, dim) / 64
    )


def _step(layer: tde.DistributedEmbedding) -> Callable:
    """One step on a loss that is not linear in any output."""
    variables = layer.trainable_variables
    optimizer = K.Adagrad(0.05)
    optimizer.build(variables)

    def step(ids: Any, weights: Any) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            outputs = layer(ids, weights, training=True)
            loss = tf.add_n(
                [
                    tf.reduce_sum((value - 0.5 * number) ** 2)
                    for number, value in enumerate(outputs.values(), 1)
                ]
            )
        optimizer.apply(tape.gradient(loss, variables), variables)
        return outputs

    return step


def _compare(
    make: Callable[[], tde.DistributedEmbedding],
    batches: list[tuple[Mapping, Mapping | None]],
) -> tuple[ref.State, ref.State]:
    """Trains one layer eagerly and one compiled; the states before, after."""
    plain, compiled = make(), make()
    before = ref.state_of(compiled)
    steps = _step(plain), jit(_step(compiled))
    for ids, weights in batches:
        expected, outputs = (step(ids, weights) for step in steps)
        for name, value in expected.items():
            assert np.all(np.isfinite(value))
            np.testing.assert_allclose(outputs[name], value, 1e-5, 1e-6)
    ref.assert_close(ref.state_of(compiled), ref.state_of(plain), atol=5e-6)
    return before, ref.state_of(compiled)


def test_every_rule_with_repeated_ids() -> None:
    """One table each, in one function; both steps repeat ids."""

    def make() -> tde.DistributedEmbedding:
        return tde.DistributedEmbedding(
            {
                name: tde.FeatureConfig(
                    name,
                    tde.TableConfig(
                        name,
                        7,
                        2,
                        optimizer=rule(),
                        initializer=_values(7, 2),
                    ),
                )
                for name, rule in RULES.items()
            }
        )

    batches = [
        [[[3, 3, 1], [0, 1, 1]], [[6, 0, 6], [3, 3, 3]]][i] for i in (0, 1)
    ]
    before, after = _compare(
        make,
        [(dict.fromkeys(RULES, tf.constant(ids)), None) for ids in batches],
    )
    for name in set(RULES) - {"none"}:
        moved = before[name]["values"] != after[name]["values"]
        np.testing.assert_array_equal(
            np.flatnonzero(moved.any(1)), [0, 1, 3, 6], name
        )


TABLES = {"a": (9, 4), "b": (5, 4), "c": (6, 3)}
#: What the features are fed in two batches, of as many ids each, so that XLA
#: compiles once.
ROWS = {
    "dense": [[[1, 1, 8], [0, 8, 2]], [[1, 4, 4], [4, 0, 0]]],
    "list": [[[0, 8], [], [4, 4, 4]], [[], [0, 0, 2, 8], [3]]],
    "weights": [
        [[1.0, -0.5], [], [0.5, 0.0, 2.0]],
        [[], [3.0, 1.0, 2.0, 0.5], [0.0]],
    ],
    "other": [[[4, 4], [0, 1], [3, 0]], [[1, 1], [2, 0], [4, 3]]],
}


def _many_kinds() -> tde.DistributedEmbedding:
    """Shared tables, all kinds, combiners and an unreduced feature."""
    a, b, c = (
        tde.TableConfig(
            name,
            rows,
            dim,
            optimizer=K.Adam(0.05) if name == "c" else "adagrad",
            combiner={"a": "mean", "b": "sum", "c": "sqrtn"}[name],
            initializer=_values(rows, dim),
        )
        for name, (rows, dim) in TABLES.items()
    )
    return tde.DistributedEmbedding(
        {
            "dense": tde.FeatureConfig("dense", a),
            "ragged": tde.FeatureConfig("ragged", a),
            "sparse": tde.FeatureConfig("sparse", a),
            "plain": tde.FeatureConfig("plain", b),
            "sequence": tde.FeatureConfig("sequence", b, None, (None, 2, 4)),
            "weighted": tde.FeatureConfig("weighted", c),
        },
    )


def _batch_of_kinds(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    lists, weights = ROWS["list"][number], ROWS["weights"][number]
    ids = {
        "dense": ref.dense(ROWS["dense"][number]),
        "ragged": ref.ragged(lists),
        "sparse": ref.sparse(lists),
        "plain": ref.dense(ROWS["other"][number], tf.int32),
        "sequence": ref.ragged(lists),
        "weighted": ref.ragged(lists),
    }
    ids["sequence"] = tf.minimum(ids["sequence"], 4)
    ids["weighted"] = tf.minimum(ids["weighted"], 5)
    return ids, {
        **dict.fromkeys(ids),
        "sparse": ref.sparse(weights, tf.float32),
        "weighted": ref.ragged(weights, tf.float32),
    }


def test_dense_ragged_and_sparse_features_in_stacks() -> None:
    _compare(_many_kinds, [_batch_of_kinds(0), _batch_of_kinds(1)])


def test_training_equals_dense_keras() -> None:
    layer = ref.make_layer(optimizers=ref.own_optimizers())
    ref.train(layer, wrap=jit)
    reference = ref.DenseReference(ref.DENSE_FEATURES, ref.own_optimizers())
    ref.assert_close(ref.state_of(layer), reference.run().state, atol=5e-6)


OUTSIDE = [-1, 5, 6, 2**31 - 1, -(2**31), 2**32 + 1, -(2**40)]


def _one_table(combiner: str, optimizer: Any = "adam") -> dict[str, Any]:
    table = tde.TableConfig(
        "t",
        5,
        3,
        optimizer=optimizer,
        combiner=combiner,
        initializer=_values(5, 3),
    )
    return {
        "reduced": tde.FeatureConfig("reduced", table),
        "sequence": tde.FeatureConfig("sequence", table, None, (None, 3, 3)),
    }


@pytest.mark.parametrize(
    "combiner, policy", [("mean", "error"), ("sum", "drop"), ("sqrtn", "error")]
)
def test_ids_outside_the_table_move_nothing_and_read_nothing(
    combiner: str, policy: str
) -> None:
    """Not the first row nor the last, which XLA reads in their place.

    Those have a momentum from a step before, which would move them.
    """
    bags = [[*OUTSIDE, 2], [3, *OUTSIDE], [*OUTSIDE, OUTSIDE[0]]]
    layer = tde.DistributedEmbedding(_one_table(combiner), invalid_ids=policy)
    step = jit(_step(layer))
    first = tf.constant([[0, 4] * 4] * 3, tf.int64)
    step({"reduced": first, "sequence": first}, None)
    values = _values(5, 3)
    values[[0, 4]] = np.nan
    layer.set_embedding_tables({"t": values})
    before = ref.state_of(layer)["t"]
    assert np.all(before["momentum"][[0, 4]] != 0)
    ids = {"reduced": ref.dense(bags), "sequence": ref.dense(bags)}
    outputs = step(ids, None)
    np.testing.assert_allclose(
        outputs["reduced"], [values[2], values[3], [0, 0, 0]], 1e-6
    )
    np.testing.assert_allclose(outputs["sequence"][:2, 0], values[[2, 3]], 1e-6)
    np.testing.assert_array_equal(outputs["sequence"][:, 1:], 0)
    np.testing.assert_array_equal(outputs["sequence"][2], 0)
    after = ref.state_of(layer)["t"]
    for slot in ("values", "momentum", "velocity"):
        moved = (before[slot] != after[slot]) & ~np.isnan(before[slot])
        np.testing.assert_array_equal(np.flatnonzero(moved.any(1)), [2, 3])
        rest = [0, 1, 4]
        np.testing.assert_array_equal(before[slot][rest], after[slot][rest])
    dropped = sum(i in OUTSIDE for bag in bags for i in bag)
    assert layer.id_statistics()["dropped"] == {
        "reduced": dropped,
        "sequence": dropped,
    }


def test_dropped_ids_equal_those_dropped_without_xla() -> None:
    """Also in ragged and sparse rows, with weights, before any cut."""

    def make() -> tde.DistributedEmbedding:
        table = tde.TableConfig(
            "t", 5, 3, optimizer="adagrad", initializer=_values(5, 3)
        )
        return tde.DistributedEmbedding(
            {
                "ragged": tde.FeatureConfig("ragged", table, (None, 2)),
                "sparse": tde.FeatureConfig("sparse", table, (None, 2)),
                "sequence": tde.FeatureConfig(
                    "sequence", table, (None, 3), (None, 2, 3)
                ),
            },
            invalid_ids="drop",
        )

    rows = [[-1, 0, 9, 4, 2], [], [5, 5], [4, 4]]
    weights = [[9.0, 1.0, 9.0, 0.5, 9.0], [], [9.0, 9.0], [1.0, 2.0]]
    ids = {
        "ragged": ref.ragged(rows),
        "sparse": ref.sparse(rows),
        "sequence": ref.ragged(rows),
    }
    weights = {
        "ragged": ref.ragged(weights, tf.float32),
        "sparse": ref.sparse(weights, tf.float32),
        "sequence": None,
    }
    before, after = _compare(make, [(ids, weights)])
    moved = before["t"]["values"] != after["t"]["values"]
    np.testing.assert_array_equal(np.flatnonzero(moved.any(1)), [0, 4])


def test_a_rate_is_reassigned_between_compiled_steps() -> None:
    for optimizer in (K.Adam(0.1), native.Adagrad(0.1)):
        layer = tde.DistributedEmbedding(_one_table("sum", optimizer))
        step = jit(_step(layer))
        ids = dict.fromkeys(("reduced", "sequence"), tf.constant([[1, 2, 2]]))
        values = [ref.state_of(layer)["t"]["values"]]
        for rate in (0.1, 0.0, 0.2):
            layer.table_optimizers["t"].learning_rate = rate
            step(ids, None)
            values.append(ref.state_of(layer)["t"]["values"])
        moves = np.abs(np.diff(values, axis=0)).max((1, 2))
        assert moves[0] > 1e-3
        assert moves[1] == 0
        assert moves[2] > 1e-3


def test_two_calls_in_a_step() -> None:
    def run(wrap: Callable) -> ref.State:
        layer = tde.DistributedEmbedding(_one_table("sum", "adagrad"))
        variables = layer.trainable_variables
        optimizer = K.SGD()
        optimizer.build(variables)

        def step(first: tf.Tensor, second: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                outputs = [
                    layer({"reduced": ids, "sequence": ids}, training=True)
                    for ids in (first, second)
                ]
                loss = tf.add_n(
                    [tf.reduce_sum(v**2) for o in outputs for v in o.values()]
                )
            optimizer.apply(tape.gradient(loss, variables), variables)

        wrap(step)(tf.constant([[0, 4, 4]]), tf.constant([[4, 0, 1]]))
        return ref.state_of(layer)

    ref.assert_close(run(jit), run(tf.function))


def test_fit_and_predict_with_loss_scaling() -> None:
    def run(compiled: bool) -> tuple[ref.State, np.ndarray]:
        layer = ref.make_layer(optimizers=ref.own_optimizers())
        model = ref.model_of(layer)
        kernel = model.layers[-1].kernel
        kernel.assign(np.ones(kernel.shape) / 8)
        model.compile(
            K.LossScaleOptimizer(K.SGD(0.1), initial_scale=64.0),
            "mse",
            jit_compile=compiled,
        )
        assert model.jit_compile == compiled
        data = ref.dense_dataset()
        model.fit(data, shuffle=False, verbose=0)
        ids, _ = next(iter(data))
        fewer = {name: value[:3] for name, value in ids.items()}
        return ref.state_of(layer), model.predict(fewer, verbose=0)

    plain, compiled = run(False), run(True)
    ref.assert_close(compiled[0], plain[0], atol=5e-6)
    np.testing.assert_allclose(compiled[1], plain[1], rtol=1e-4, atol=1e-5)


def test_dense_inputs_support_jit_and_others_do_not() -> None:
    layer = tde.DistributedEmbedding(_one_table("sum"))
    ids = dict.fromkeys(("reduced", "sequence"), tf.constant([[1, 2]]))
    layer(ids)
    assert layer.supports_jit
    layer(dict.fromkeys(ids, ref.ragged([[1, 2]])))
    assert not layer.supports_jit
