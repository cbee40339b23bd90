"""Nested structures: outputs come back as feature_configs are built."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tf_distembed import structures


class Pair(NamedTuple):
    first: Any
    second: Any


#: Each makes a structure out of what its argument returns, leaf by leaf.
STRUCTURES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "bare": lambda leaf: leaf(),
    "dict": lambda leaf: {"z": leaf(), "a": leaf()},
    "list": lambda leaf: [leaf(), leaf()],
    "tuple": lambda leaf: (leaf(), leaf()),
    "namedtuple": lambda leaf: Pair(leaf(), leaf()),
    "ordered_dict": lambda leaf: collections.OrderedDict(
        [("z", leaf()), ("a", leaf())]
    ),
    "integer_keys": lambda leaf: {2: leaf(), 1: leaf()},
    "one_leaf": lambda leaf: [leaf()],
    "nested": lambda leaf: {
        "z": [leaf(), (leaf(), {"b": leaf(), "a": leaf()})],
        "a": Pair(leaf(), [leaf()]),
    },
    "with_empty_parts": lambda leaf: {"z": leaf(), "none": [], "a": ({},)},
}


def numbered(make: Callable[[Callable[[], Any]], Any]) -> Any:
    """The structure with 0, 1, 2, ... at its leaves."""
    count = iter(range(100))
    return make(lambda: next(count))


def layer_of(make: Callable[[Callable[[], Any]], Any]) -> Any:
    """A feature a leaf; row 1 of the table of leaf `i` is `[i, i]`."""
    count = iter(range(100))

    def feature() -> tde.FeatureConfig:
        i = next(count)
        table = tde.TableConfig(
            f"t{i}", 3, 2, initializer=np.full([3, 2], i), combiner="sum"
        )
        return tde.FeatureConfig(f"f{i}", table)

    return tde.DistributedEmbedding(make(feature))


def read_off(outputs: Any) -> Any:
    """The number of each leaf, out of the outputs."""
    return structures.map_leaves(outputs, lambda x: int(x[0, 0]))


def assert_same(found: Any, expected: Any) -> None:
    assert found == expected
    assert [type(part) for part in parts_of(found)] == [
        type(part) for part in parts_of(expected)
    ]
    # Equal dicts may differ in order.
    assert repr(found) == repr(expected)


def parts_of(structure: Any) -> list[Any]:
    if isinstance(structure, dict):
        children = list(structure.values())
    elif isinstance(structure, (list, tuple)):
        children = list(structure)
    else:
        return []
    return [structure, *(p for child in children for p in parts_of(child))]


@pytest.mark.parametrize("name", STRUCTURES)
def test_outputs_have_structure_and_order_of_feature_configs(name):
    make = STRUCTURES[name]
    layer = layer_of(make)
    inputs = make(lambda: tf.constant([1, 1]))
    assert_same(read_off(layer(inputs)), numbered(make))
    weights = make(lambda: tf.constant([1.0, 1.0]))
    assert_same(read_off(layer(inputs, weights)), numbered(make))
    shapes = layer.compute_output_shape(make(lambda: tf.TensorShape([5])))
    expected = structures.map_leaves(numbered(make), lambda _: (5, 2))
    assert repr(shapes) == repr(expected)


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_survive_a_config_in_json(name):
    make = STRUCTURES[name]
    written = keras.saving.serialize_keras_object(layer_of(make))
    again = keras.saving.deserialize_keras_object(
        json.loads(json.dumps(written))
    )
    outputs = read_off(again(make(lambda: tf.constant([1]))))
    # A namedtuple comes back as one of the same name and fields.
    assert repr(outputs) == repr(numbered(make))


@pytest.mark.parametrize("name", ["dict", "nested", "namedtuple", "bare"])
def test_structures_in_a_traced_function(name):
    make = STRUCTURES[name]
    layer = layer_of(make)
    outputs = tf.function(lambda x: layer(x))(make(lambda: tf.constant([1])))
    assert_same(read_off(outputs), numbered(make))


@pytest.mark.parametrize(
    "name", ["dict", "list", "tuple", "namedtuple", "ordered_dict", "nested"]
)
def test_structures_of_keras_tensors(name):
    make = STRUCTURES[name]
    layer = layer_of(make)
    outputs = layer(make(lambda: keras.Input((), dtype="int64")))
    specs = structures.map_leaves(outputs, lambda x: (x.shape, x.dtype))
    expected = structures.map_leaves(
        numbered(make), lambda _: ((None, 2), "float32")
    )
    assert repr(specs) == repr(expected)


def test_lists_and_tuples_stand_for_each_other():
    layer = layer_of(STRUCTURES["list"])
    for inputs in ([[1], [1]], ([1], [1]), Pair([1], [1])):
        assert read_off(layer(inputs)) == [0, 1]


def test_the_order_of_the_inputs_keys_does_not_matter():
    layer = layer_of(STRUCTURES["dict"])
    outputs = layer({"a": tf.constant([1]), "z": tf.constant([1])})
    assert list(outputs.items())[0][0] == "z"
    assert read_off(outputs) == {"z": 0, "a": 1}


WRONG_INPUTS = [
    ([[1]], ["inputs", "a dict with the keys ['z', 'a']", "a list of 1"]),
    (
        {"z": [[1], ([1], {"b": [1], "a": [1]})]},
        ["inputs", "['z', 'a']", "Missing: ['a']", "Unexpected: []"],
    ),
    (
        {"z": [1], "a": Pair([1], [[1]]), "q": [1]},
        ["inputs", "['z', 'a']", "Missing: []", "Unexpected: ['q']"],
    ),
    (
        {"z": [[1]], "a": Pair([1], [[1]])},
        ["inputs at ('z',)", "of 2 entries", "a list of 1"],
    ),
    (
        {"z": [[1], ([1], [[1], [1]])], "a": Pair([1], [[1]])},
        ["inputs at ('z', 1, 1)", "['b', 'a']", "a list of 2"],
    ),
    (
        {"z": [[1], ([1], {"b": [1], "a": [1]})], "a": {"first": [1]}},
        ["inputs at ('a',)", "of 2 entries", "a dict"],
    ),
    (
        {"z": None, "a": Pair([1], [[1]])},
        ["inputs at ('z',)", "of 2 entries", "a NoneType"],
    ),
]


@pytest.mark.parametrize("inputs, parts", WRONG_INPUTS)
def test_inputs_of_another_structure_are_refused(inputs, parts):
    layer = layer_of(STRUCTURES["nested"])
    for call in (layer, layer.preprocess):
        with pytest.raises(ValueError) as caught:
            call(inputs)
        for part in parts:
            assert part in str(caught.value)


def test_weights_of_another_structure_are_refused():
    layer = layer_of(STRUCTURES["list"])
    with pytest.raises(ValueError) as caught:
        layer([[1], [1]], [[1.0]])
    assert "weights must be a list or tuple of 2" in str(caught.value)
    assert "a list of 1" in str(caught.value)


def test_shapes_of_another_structure_are_refused():
    layer = layer_of(STRUCTURES["dict"])
    with pytest.raises(ValueError, match=r"input shapes must have the keys"):
        layer.compute_output_shape({"z": (3,)})


def test_a_missing_leaf_is_named_by_its_feature():
    layer = layer_of(STRUCTURES["list"])
    with pytest.raises(TypeError) as caught:
        layer([[1], None])
    assert "Feature 'f1': ids must be a tensor" in str(caught.value)
    assert "None (of type NoneType)" in str(caught.value)


@pytest.mark.parametrize("empty", [{}, [], (), {"a": {}}, [[], ()]])
def test_structures_without_a_feature_are_refused(empty):
    with pytest.raises(ValueError) as caught:
        tde.DistributedEmbedding(empty)
    assert "at least one FeatureConfig" in str(caught.value)
    assert repr(empty) in str(caught.value)


TABLE = tde.TableConfig("t", 3, 2)


@pytest.mark.parametrize(
    "configs, parts",
    [
        (None, ["Received: None", "NoneType"]),
        ({"a": None}, ["Received at ('a',): None"]),
        (
            {"a": [tde.FeatureConfig("f", TABLE), 3]},
            ["Received at ('a', 1): 3", "int"],
        ),
        (TABLE, ["Received: TableConfig", "TableConfig"]),
        ({"a": "f"}, ["Received at ('a',): 'f'", "str"]),
    ],
)
def test_leaves_that_are_no_features_are_refused(configs, parts):
    with pytest.raises(TypeError) as caught:
        tde.DistributedEmbedding(configs)
    for part in ["nested structure of FeatureConfig", *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "configs",
    [
        {"b": 0, "preprocessed_inputs_per_placement": 0},
        {"a": {"preprocessed_inputs_per_placement": 0}},
    ],
)
def test_the_reserved_key_is_refused(configs):
    features = iter(tde.FeatureConfig(f"f{i}", TABLE) for i in range(2))
    configs = structures.map_leaves(configs, lambda _: next(features))
    with pytest.raises(ValueError) as caught:
        tde.DistributedEmbedding(configs)
    assert "'preprocessed_inputs_per_placement'" in str(caught.value)
    assert "result of preprocess" in str(caught.value)


def test_the_reserved_name_is_refused():
    name = "preprocessed_inputs_per_placement"
    with pytest.raises(ValueError, match=f"may not be named '{name}'"):
        tde.DistributedEmbedding([tde.FeatureConfig(name, TABLE)])
