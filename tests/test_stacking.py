"""Which tables are looked up together, and that it changes no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests import dense_reference as ref
from tf_distembed.backends import compilation

K = keras.optimizers
native = tf.tpu.experimental.embedding

#: table -> rows; of equal width and optimizer, so that they may be stacked.
TABLES = {"a": 9, "b": 4, "c": 6, "d": 5}
DIM = 3
#: The features of a table do not stand together, nor in the tables' order.
FEATURES = {
    "c1": ("c", "ragged"),
    "a1": ("a", "one"),
    "d1": ("d", "dense"),
    "b1": ("b", "ragged"),
    "a2": ("a", "weighted"),
    "c2": ("c", "dense"),
}
#: The last rows of a table beside the first of the next.
IDS = {
    "c1": [[5, 0, 5], [], [1], []],
    "a1": [[8], [0], [8], [3]],
    "d1": [[4, 0], [4, 4], [1, 2], [0, 0]],
    "b1": [[], [3, 3, 0], [], [2]],
    "a2": [[8, 7], [], [0, 0, 8], [1]],
    "c2": [[0, 5], [5, 5], [3, 0], [2, 2]],
}
WEIGHTS = [[0.5, 2.0], [], [1.0, -0.5, 0.0], [3.0]]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none, the tables of a stack are searched one by one."""
    monkeypatch.setattr(compilation, "has_gpu", lambda: True)


def eagerly(step: Callable) -> Callable:
    return step


def make_layer(
    table_stacking: Any,
    own: Callable[[str], Any] = lambda name: "adam",
    widths: dict[str, int] | None = None,
    frozen: str = "",
    **settings: Any,
) -> tde.DistributedEmbedding:
    combiners = dict(zip(TABLES, ["mean", "sum", "sqrtn", "mean"], strict=True))
    tables = {}
    for number, (name, rows) in enumerate(TABLES.items()):
        dim = (widths or {}).get(name, DIM)
        values = np.arange(rows * dim, dtype=np.float32).reshape(rows, dim)
        tables[name] = tde.TableConfig(
            name,
            rows,
            dim,
            combiner=combiners[name],
            optimizer=own(name),
            initializer=values / 32 + number,
            trainable=name not in frozen,
        )
    return tde.DistributedEmbedding(
        {
            name: tde.FeatureConfig(name, tables[table])
            for name, (table, _) in FEATURES.items()
        },
        table_stacking=table_stacking,
        **settings,
    )


def batch() -> tuple[dict[str, Any], dict[str, Any]]:
    make = {
        "ragged": ref.ragged,
        "weighted": ref.ragged,
        "dense": ref.dense,
        "one": ref.dense,
    }
    ids = {name: make[kind](IDS[name]) for name, (_, kind) in FEATURES.items()}
    weights = dict.fromkeys(ids)
    weights["a2"] = ref.ragged(WEIGHTS, tf.float32)
    return ids, weights


def trained(
    layer: tde.DistributedEmbedding, wrap: Callable = eagerly
) -> tuple[dict[str, np.ndarray], ref.State]:
    """The outputs of the second step, and the state after two."""
    variables = layer.trainable_variables
    optimizer = K.SGD(0.1)
    optimizer.build(variables)

    def step(ids: Any, weights: Any) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            outputs = layer(ids, weights, training=True)
            loss = tf.add_n([tf.reduce_sum(v**3) for v in outputs.values()])
        optimizer.apply(tape.gradient(loss, variables), variables)
        return outputs

    run = wrap(step)
    run(*batch())
    outputs = {name: v.numpy() for name, v in run(*batch()).items()}
    return outputs, ref.state_of(layer)


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, np.ndarray], ref.State]:
    """Every table looked up by itself."""
    return trained(make_layer(None))


@pytest.mark.parametrize(
    "stacking",
    [
        "auto",
        [["a", "b", "c", "d"]],
        [["d", "b"], ["c", "a"]],
        [["c", "a"]],
        ["b", "d"],
        [["a"], ["b"]],
        [],
    ],
    ids=str,
)
def test_stacking_changes_no_result(stacking: Any, alone: Any) -> None:
    outputs, state = trained(make_layer(stacking))
    assert list(outputs) == list(FEATURES)
    for name, value in alone[0].items():
        np.testing.assert_allclose(outputs[name], value, 1e-6, 1e-6, name)
    ref.assert_close(state, alone[1], atol=1e-6, rtol=1e-6)


def test_in_a_function_and_for_inference(alone: Any) -> None:
    layer = make_layer([["d", "a", "b"]])
    outputs, state = trained(layer, tf.function)
    for name, value in alone[0].items():
        np.testing.assert_allclose(outputs[name], value, 1e-6, 1e-6, name)
    ref.assert_close(state, alone[1], atol=1e-6, rtol=1e-6)
    ids, weights = batch()
    inferred = layer(ids, weights, training=False)
    for name, value in layer(ids, weights, training=True).items():
        np.testing.assert_allclose(inferred[name], value, 1e-6, 1e-6, name)


def test_dropped_ids_of_one_table_read_no_other() -> None:
    """An id just beyond a table is the first row of the next in the stack."""
    ids, weights = batch()
    ids["a1"] = tf.constant([[9], [-1], [10], [3]])
    ids["b1"] = ref.ragged([[4], [-1, 3], [], [10**12]])
    states = []
    for stacking in ("auto", None):
        layer = make_layer(stacking, invalid_ids="drop")
        variables = layer.trainable_variables
        with tf.GradientTape() as tape:
            outputs = layer(ids, weights, training=True)
            loss = tf.add_n([tf.reduce_sum(v**2) for v in outputs.values()])
        K.SGD().apply(tape.gradient(loss, variables), variables)
        np.testing.assert_array_equal(outputs["a1"][:3], np.zeros([3, DIM]))
        np.testing.assert_array_equal(outputs["b1"][0], np.zeros([DIM]))
        states.append(ref.state_of(layer))
        assert layer.id_statistics()["dropped"]["a1"] == 3
        assert layer.id_statistics()["dropped"]["b1"] == 3
    ref.assert_close(states[0], states[1], atol=1e-6)


# -- "auto": what is alike ---------------------------------------------------


def stacks_of(
    table_stacking: Any,
    own: Callable[[str], Any] = lambda name: "adam",
    widths: dict[str, int] | None = None,
    frozen: str = "",
    **settings: Any,
) -> int:
    """How many lookups a training step makes: one `unique` a stack."""
    layer = tde.DistributedEmbedding(
        {
            name: tde.FeatureConfig(
                name,
                tde.TableConfig(
                    name,
                    rows,
                    (widths or {}).get(name, DIM),
                    optimizer=own(name),
                    trainable=name not in frozen,
                ),
            )
            for name, rows in TABLES.items()
        },
        table_stacking=table_stacking,
        **settings,
    )
    function = tf.function(
        lambda ids: layer(dict.fromkeys(TABLES, ids), training=True)
    ).get_concrete_function(tf.TensorSpec([2], tf.int64))
    types = [op.type for op in function.graph.get_operations()]
    return types.count("Unique") + types.count("UniqueV2")


SHARED = K.Adagrad(0.1)
AUTO: dict[str, tuple[Callable[[str], Any], int]] = {
    "one name": (lambda name: "adam", 1),
    "one name, two spellings": (
        lambda name: "adam" if name in "ab" else "Adam",
        1,
    ),
    "two names": (lambda name: "sgd" if name in "ab" else "adagrad", 2),
    "equal configs": (
        lambda name: {"class_name": "SGD", "config": {"learning_rate": 0.1}},
        1,
    ),
    "numbered configs": (
        lambda name: keras.optimizers.serialize(K.SGD(0.1, name=f"sgd_{name}")),
        1,
    ),
    "other rates": (
        lambda name: {
            "class_name": "SGD",
            "config": {"learning_rate": 0.1 if name == "a" else 0.2},
        },
        2,
    ),
    "one object": (lambda name: SHARED, 1),
    "equal objects": (lambda name: K.SGD(0.1), 4),
    "native objects": (lambda name: native.SGD(0.1), 4),
    "none": (lambda name: None, 1),
    "none and a name": (lambda name: None if name == "a" else "sgd", 2),
}


@pytest.mark.parametrize("name", AUTO)
def test_auto_stacks_what_is_alike(name: str) -> None:
    own, stacks = AUTO[name]
    assert stacks_of("auto", own) == stacks


def test_none_stacks_nothing() -> None:
    assert stacks_of(None) == len(TABLES)


@pytest.mark.parametrize(
    "given", ["adagrad", K.Adagrad(0.1)], ids=["name", "object"]
)
def test_auto_stacks_the_tables_of_the_layers_optimizer(given: Any) -> None:
    assert stacks_of("auto", lambda name: None, optimizer=given) == 1


def test_auto_keeps_widths_and_frozen_tables_apart() -> None:
    assert stacks_of("auto", frozen="ac") == 2
    assert stacks_of("auto", widths={"b": 5, "d": 5}) == 2
    layer = make_layer("auto", widths={"b": 5, "d": 5}, frozen="c")
    outputs, _ = trained(layer)
    assert outputs["b1"].shape == (4, 5)
    assert outputs["c1"].shape == (4, 3)


# -- Refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    "stacking, match",
    [
        ("AUTO", "must be 'auto', None, or lists.*'AUTO'"),
        ("a", "must be 'auto', None, or lists"),
        ([["a", "e"]], "table 'e', which does not exist"),
        (["a", "x"], "table 'x', which does not exist"),
        ([["a", "b"], ["b", "c"]], "'b'.*(twice|more than once)"),
        (["a", "a"], "'a'.*(twice|more than once)"),
    ],
    ids=str,
)
def test_a_wrong_value_raises(stacking: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_layer(stacking)


@pytest.mark.parametrize(
    "stacking", [3, True, {"a": "b"}, [["a"], "b"], [["a", 3]], [None]], ids=str
)
def test_another_form_is_a_type_error(stacking: Any) -> None:
    with pytest.raises(TypeError, match="table_stacking must be"):
        make_layer(stacking)


@pytest.mark.parametrize(
    "settings, property_",
    [
        ({"widths": {"b": 5}}, "embedding_dim"),
        (
            {"own": lambda name: "sgd" if name == "b" else "adam"},
            "optimizer",
        ),
        ({"own": lambda name: K.SGD(0.1)}, "optimizer"),
        (
            {"own": lambda name: None if name == "b" else "adam"},
            "optimizer",
        ),
    ],
    ids=["width", "names", "objects", "none"],
)
def test_tables_that_cannot_be_together_raise(
    settings: dict[str, Any], property_: str
) -> None:
    match = f"'a' and 'b' together, but they differ in .*{property_}"
    with pytest.raises(ValueError, match=match):
        make_layer([["a", "b"]], **settings)
