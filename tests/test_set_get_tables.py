"""Reading and setting tables and their rows, outside any training."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde

ITEM, USER = (7, 3), (4, 2)


def make_layer(**arguments: Any) -> tde.DistributedEmbedding:
    item = tde.TableConfig("item", *ITEM, optimizer="adagrad")
    user = tde.TableConfig("user", *USER, optimizer="adam")
    plain = tde.TableConfig("plain", *USER, optimizer=None)
    return tde.DistributedEmbedding(
        [
            tde.FeatureConfig("f_item", item),
            tde.FeatureConfig("f_user", user),
            tde.FeatureConfig("f_plain", plain),
        ],
        **arguments,
    )


def train(layer: tde.DistributedEmbedding) -> None:
    """A step on rows 0 and 1 of each table."""
    with tf.GradientTape() as tape:
        found = layer([[0, 1]] * 3, training=True)
        loss = tf.add_n([tf.reduce_sum(x**2) for x in found])
    variables = layer.trainable_variables
    keras.optimizers.SGD(0.1).apply(tape.gradient(loss, variables), variables)


def state_of(layer: tde.DistributedEmbedding) -> dict[str, Any]:
    state = {
        name: value.numpy()
        for name, value in layer.get_embedding_tables().items()
    }
    for table, slots in layer.get_optimizer_state().items():
        for slot, value in slots.items():
            state[f"{table} {slot}"] = np.array(value)
    return state


def assert_state(layer: tde.DistributedEmbedding, expected: Any) -> None:
    found = state_of(layer)
    assert list(found) == list(expected)
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_tables_come_in_order_of_configuration_and_unpadded():
    tables = make_layer().get_embedding_tables()
    assert list(tables) == ["item", "user", "plain"]
    assert [tuple(table.shape) for table in tables.values()] == [
        ITEM,
        USER,
        USER,
    ]
    assert all(isinstance(table, tf.Tensor) for table in tables.values())


def test_what_is_read_is_a_copy():
    layer = make_layer()
    before = layer.get_embedding_tables()
    slots = layer.get_optimizer_state()["item"]
    kept = before["item"].numpy().copy()
    kept_slot = slots["accumulator"].numpy().copy()
    train(layer)
    np.testing.assert_array_equal(before["item"], kept)
    np.testing.assert_array_equal(slots["accumulator"], kept_slot)
    assert (layer.get_embedding_tables()["item"].numpy() != kept).any()
    before["item"].numpy()[:] = 0.0
    assert layer.get_embedding_tables()["item"].numpy().all()


def test_the_optimizer_state_has_keras_slot_names_and_the_step():
    layer = make_layer()
    state = layer.get_optimizer_state()
    assert {table: list(slots) for table, slots in state.items()} == {
        "item": ["accumulator", "step"],
        "user": ["momentum", "velocity", "step"],
    }
    np.testing.assert_array_equal(
        state["item"]["accumulator"], np.full(ITEM, 0.1, "float32")
    )
    np.testing.assert_array_equal(state["user"]["momentum"], np.zeros(USER))
    assert state["item"]["step"] == 0
    assert type(state["item"]["step"]) is int
    train(layer)
    state = layer.get_optimizer_state()
    assert state["item"]["step"] == state["user"]["step"] == 1
    assert (state["item"]["accumulator"].numpy()[:2] > 0.1).all()
    np.testing.assert_array_equal(
        state["item"]["accumulator"][2:], np.full([5, 3], 0.1, "float32")
    )


VALUES = np.arange(21.0).reshape(ITEM)


@pytest.mark.parametrize(
    "values",
    [
        VALUES,
        VALUES.astype("float32"),
        VALUES.astype("int16"),
        VALUES.tolist(),
        tf.constant(VALUES),
        tf.constant(VALUES, tf.bfloat16),
        tf.Variable(VALUES),
        keras.Variable(VALUES),
    ],
    ids=[
        "float64",
        "float32",
        "int16",
        "list",
        "tensor",
        "bfloat16",
        "variable",
        "keras",
    ],
)
def test_a_whole_table_is_set(values):
    layer = make_layer()
    train(layer)
    expected = {**state_of(layer), "item": VALUES}
    layer.set_embedding_tables({"item": values})
    assert_state(layer, expected)
    np.testing.assert_array_equal(layer([[3], [0], [0]])[0], VALUES[[3]])


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "uint64"])
def test_some_rows_are_set(dtype):
    layer = make_layer()
    train(layer)
    expected = state_of(layer)
    expected["item"][[5, 0]] = VALUES[:2]
    expected["plain"][3] = [8.0, 9.0]
    layer.set_embedding_tables(
        {
            "item": (np.array([5, 0], dtype), VALUES[:2]),
            "plain": ([3], [[8.0, 9.0]]),
            "user": (np.zeros([0], dtype), np.zeros([0, 2])),
        }
    )
    assert_state(layer, expected)


def test_setting_nothing_changes_nothing():
    layer = make_layer()
    expected = state_of(layer)
    layer.set_embedding_tables({})
    assert_state(layer, expected)


def test_slots_of_a_whole_table_start_again_with_its_step_count():
    layer = make_layer()
    train(layer)
    expected = state_of(layer)
    expected["item"] = VALUES
    expected["item accumulator"] = np.full(ITEM, 0.1, "float32")
    expected["item step"] = np.array(0)
    layer.set_embedding_tables({"item": VALUES}, reset_slots=True)
    assert_state(layer, expected)


def test_slots_of_some_rows_start_again_and_the_step_count_stays():
    layer = make_layer()
    train(layer)
    expected = state_of(layer)
    expected["user"][[1, 3]] = 5.0
    expected["user momentum"][[1, 3]] = 0.0
    expected["user velocity"][[1, 3]] = 0.0
    assert expected["user momentum"][0].all()
    expected["plain"][2] = 1.0
    layer.set_embedding_tables(
        {
            "user": ([1, 3], np.full([2, 2], 5.0)),
            "plain": ([2], np.ones([1, 2])),
        },
        reset_slots=True,
    )
    assert_state(layer, expected)


def test_training_goes_on_from_what_was_set():
    layers = [make_layer(), make_layer()]
    tables = layers[0].get_embedding_tables()
    layers[1].set_embedding_tables(tables)
    for layer in layers:
        train(layer)
    assert_state(layers[1], state_of(layers[0]))


def test_a_bfloat16_table_is_read_and_set():
    table = tde.TableConfig("item", *ITEM, optimizer="adagrad")
    layer = tde.DistributedEmbedding(
        tde.FeatureConfig("f", table), dtype="bfloat16"
    )
    layer.set_embedding_tables({"item": VALUES}, reset_slots=True)
    found = layer.get_embedding_tables()["item"]
    assert found.dtype == tf.bfloat16
    np.testing.assert_array_equal(tf.cast(found, "float32"), VALUES)


WRONG = [
    (
        {"movie": VALUES},
        ValueError,
        ["no table 'movie'", "['item', 'plain', 'user']"],
    ),
    ({"item": VALUES[:6]}, ValueError, ["'item'", "(7, 3)", "(6, 3)"]),
    ({"item": VALUES.T}, ValueError, ["'item'", "(7, 3)", "(3, 7)"]),
    ({"item": 3.0}, ValueError, ["'item'", "(7, 3)", "()"]),
    ({"item": (VALUES,)}, ValueError, ["'item'", "(row ids, values)", "of 1"]),
    (
        {"item": ([0, 1], VALUES[:3])},
        ValueError,
        ["'item'", "values of 2 rows", "(2, 3)", "(3, 3)"],
    ),
    (
        {"item": ([0.0], VALUES[:1])},
        ValueError,
        ["'item'", "row ids must be integers", "float64"],
    ),
    (
        {"item": ([[0]], VALUES[:1])},
        ValueError,
        ["'item'", "shape [R]", "(1, 1)"],
    ),
    (
        {"item": ([7], VALUES[:1])},
        ValueError,
        ["'item'", "from 0 to 6", "[7]"],
    ),
    (
        {"item": ([-1], VALUES[:1])},
        ValueError,
        ["'item'", "from 0 to 6", "[-1]"],
    ),
    (
        {"item": ([2, 2], VALUES[:2])},
        ValueError,
        ["'item'", "distinct", "[2, 2]"],
    ),
    (
        {"item": np.full(ITEM, "a")},
        TypeError,
        ["'item'", "floats or integers", "<U1"],
    ),
    (
        {"item": ([0], [[None, 1, 2]])},
        TypeError,
        ["'item'", "floats or integers", "object"],
    ),
    (
        {"item": np.full(ITEM, True)},
        TypeError,
        ["'item'", "floats or integers", "bool"],
    ),
    ([VALUES], TypeError, ["tables must be a dict", "list"]),
]


@pytest.mark.parametrize("tables, error, parts", WRONG)
def test_what_cannot_be_set_is_refused_and_nothing_is_set(tables, error, parts):
    layer = make_layer()
    before = state_of(layer)
    if isinstance(tables, dict):  # a right one first
        tables = {"user": np.ones(USER), **tables}
    with pytest.raises(error) as caught:
        layer.set_embedding_tables(tables, reset_slots=True)
    for part in parts:
        assert part in str(caught.value), caught.value
    assert_state(layer, before)
