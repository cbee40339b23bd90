"""Configurations: what they accept, refuse and write, and when they are read.

Every error names the table or feature, what was received and what to do.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde

native = tf.tpu.experimental.embedding


def table(name: str = "item", **fields: Any) -> tde.TableConfig:
    return tde.TableConfig(
        **{"name": name, "vocabulary_size": 10, "embedding_dim": 4, **fields}
    )


def assert_says(error: pytest.ExceptionInfo, parts: Sequence[str]) -> None:
    text = str(error.value)
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} not in: {text}"


# -- TableConfig --------------------------------


def test_arguments_stand_in_the_order_of_keras_rs():
    config = tde.TableConfig("item", 10, 4, "zeros", "sgd", "sum", "auto", 7, 8)
    assert config.initializer == "zeros"
    assert config.optimizer == "sgd"
    assert config.combiner == "sum"
    assert config.placement == "auto"
    assert config.max_ids_per_partition == 7
    assert config.max_unique_ids_per_partition == 8
    assert config.trainable is True


def test_defaults():
    config = tde.TableConfig("item", 10, 4)
    assert (config.optimizer, config.combiner) == ("adam", "mean")
    assert (config.placement, config.trainable) == ("auto", True)
    assert config.max_ids_per_partition == 256
    assert config.max_unique_ids_per_partition == 256
    assert config.initializer is None


def test_numpy_integers_become_integers():
    config = table(vocabulary_size=np.int32(10), embedding_dim=np.int64(4))
    assert type(config.vocabulary_size) is int
    assert type(config.embedding_dim) is int


def test_configurations_are_compared_by_identity():
    assert table() != table()
    one = table()
    assert one == one
    assert len({one, table()}) == 2


BAD_TABLES = [
    ({"name": 3}, TypeError, ["name", "3", "int"]),
    ({"name": ""}, ValueError, ["name", "''"]),
    ({"name": "a/b"}, ValueError, ["name", "'a/b'", "'/'"]),
    ({"vocabulary_size": 0}, ValueError, ["vocabulary_size=0", "at least 1"]),
    ({"vocabulary_size": -3}, ValueError, ["vocabulary_size=-3"]),
    ({"vocabulary_size": 1.5}, TypeError, ["vocabulary_size", "1.5", "float"]),
    ({"vocabulary_size": "9"}, TypeError, ["vocabulary_size", "'9'", "str"]),
    ({"vocabulary_size": True}, TypeError, ["vocabulary_size", "bool"]),
    ({"vocabulary_size": None}, TypeError, ["vocabulary_size", "NoneType"]),
    ({"embedding_dim": 0}, ValueError, ["embedding_dim=0", "at least 1"]),
    ({"embedding_dim": 2.0}, TypeError, ["embedding_dim", "2.0", "float"]),
    (
        {"max_ids_per_partition": 0},
        ValueError,
        ["max_ids_per_partition=0", "at least 1"],
    ),
    (
        {"max_unique_ids_per_partition": "x"},
        TypeError,
        ["max_unique_ids_per_partition", "'x'"],
    ),
    ({"trainable": "yes"}, TypeError, ["trainable", "True or False", "'yes'"]),
    ({"trainable": 1}, TypeError, ["trainable", "1", "int"]),
    (
        {"combiner": "max"},
        ValueError,
        ["combiner='max'", "'sum', 'mean', 'sqrtn'"],
    ),
    ({"combiner": None}, TypeError, ["combiner", "NoneType", "'mean'"]),
    (
        {"placement": "gpu"},
        ValueError,
        ["placement='gpu'", "'auto', 'default_device', 'sparsecore'"],
    ),
    ({"placement": 2}, TypeError, ["placement", "2", "int"]),
    (
        {"initializer": "nonsense"},
        ValueError,
        ["initializer", "'nonsense'", "a Keras initializer", "an array"],
    ),
    ({"initializer": 3}, ValueError, ["initializer", "3"]),
    # A class, but none of initializers.
    (
        {"initializer": object},
        ValueError,
        ["an initializer must be callable", "<class 'object'>"],
    ),
    (
        {"initializer": np.zeros([4, 10])},
        ValueError,
        ["(10, 4)", "(4, 10)", "[vocabulary_size, embedding_dim]"],
    ),
    (
        {"initializer": np.full([10, 4], "a")},
        TypeError,
        ["floats or integers", "<U1"],
    ),
    (
        {"optimizer": "rmsprop"},
        ValueError,
        ["'rmsprop'", "'sgd', 'adagrad', 'adam', 'ftrl'", "None"],
    ),
    ({"optimizer": 3}, TypeError, ["optimizer", "3", "int"]),
    (
        {"optimizer": keras.optimizers.RMSprop()},
        ValueError,
        ["RMSprop", "Adagrad", "optimizer=None"],
    ),
    (
        {"optimizer": keras.optimizers.Adam(clipnorm=1.0)},
        ValueError,
        ["Adam", "clipnorm=1.0", "Leave it at None"],
    ),
    (
        {"optimizer": keras.optimizers.SGD(weight_decay=0.1)},
        ValueError,
        ["SGD", "weight_decay=0.1"],
    ),
    (
        {"optimizer": keras.optimizers.Adam(use_ema=True)},
        ValueError,
        ["Adam", "use_ema=True", "Leave it at False"],
    ),
    (
        {"optimizer": keras.optimizers.Adam(amsgrad=True)},
        ValueError,
        ["Adam", "amsgrad=True"],
    ),
    (
        {"optimizer": {"class_name": "Lion", "config": {}}},
        ValueError,
        ["class_name", "'Lion'"],
    ),
    (
        {"optimizer": {"class_name": "Adam", "config": {"clipvalue": 2.0}}},
        ValueError,
        ["clipvalue=2.0"],
    ),
    (
        {"optimizer": native.SGD(0.1, use_gradient_accumulation=False)},
        ValueError,
        ["use_gradient_accumulation=False", "SGD"],
    ),
]


@pytest.mark.parametrize(
    "fields, error, parts", BAD_TABLES, ids=lambda v: str(v)[:40]
)
def test_table_config_refuses(fields, error, parts):
    if "name" in fields:
        parts = ["TableConfig", *parts]
    else:
        parts = ["Table 'item'", *parts]
    with pytest.raises(error) as caught:
        table(**fields)
    assert_says(caught, parts)


def test_an_absurd_vocabulary_is_refused_with_the_memory_it_would_need():
    with pytest.raises(ValueError) as caught:
        table(vocabulary_size=2**63, embedding_dim=64)
    # 2**63 rows of 64 float32 values.
    gib = 2**63 * 64 * 4 // 2**30
    assert_says(
        caught,
        ["Table 'item'", f"{2**63:,}", f"{gib:,} GiB", "4,096 GiB", "Hash"],
    )


def test_a_table_beyond_this_machine_is_refused_before_it_is_allocated():
    config = table(vocabulary_size=2**33, embedding_dim=64, optimizer="adam")
    with pytest.raises(ValueError) as caught:
        tde.DistributedEmbedding(tde.FeatureConfig("f", config))
    assert_says(
        caught,
        [
            "Table 'item'",
            f"{2**33:,} rows",
            "2,048.0 GiB",
            "with 2 slots",
            "6,144.0 GiB",
            "this machine has",
        ],
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        "sgd",
        "Adagrad",
        "ADAM",
        "ftrl",
        None,
        keras.optimizers.Adam(0.5),
        keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9),
            momentum=0.5,
        ),
        {"class_name": "adagrad", "config": {"learning_rate": 0.5}},
        native.SGD(0.5),
        native.Adagrad(0.5, initial_accumulator_value=0.25),
        native.AdagradMomentum(0.5, 0.75),
        native.Adam(0.5, sum_inside_sqrt=False),
        native.FTRL(0.5, beta=0.25),
    ],
    ids=lambda o: type(o).__module__.rsplit(".", 1)[-1] + type(o).__name__,
)
def test_a_table_config_goes_through_json_and_back(optimizer):
    config = table(optimizer=optimizer, combiner="sqrtn", trainable=False)
    written = config.get_config()
    text = json.dumps(keras.saving.serialize_keras_object(written))
    read = json.loads(text)
    before = copy.deepcopy(read)
    again = tde.TableConfig.from_config(read)
    assert read == before
    once_more = tde.TableConfig.from_config(read).get_config()
    if not isinstance(optimizer, dict):  # which gets a name of its own
        assert again.get_config() == once_more == written
    assert again.combiner == "sqrtn"
    assert again.trainable is False
    if isinstance(optimizer, str) or optimizer is None:
        assert again.optimizer == optimizer
    elif isinstance(optimizer, dict):
        assert type(again.optimizer) is keras.optimizers.Adagrad
        assert float(again.optimizer.learning_rate) == 0.5
    else:
        assert type(again.optimizer) is type(optimizer)


@keras.saving.register_keras_serializable("test_config")
def twos(shape: Any, dtype: Any = None) -> tf.Tensor:
    return tf.fill(shape, tf.constant(2.0, dtype))


@pytest.mark.parametrize(
    "initializer",
    [
        None,
        "uniform",
        keras.initializers.RandomNormal(stddev=3.0, seed=7),
        keras.initializers.RandomNormal,
        {"class_name": "Zeros", "config": {}},
        twos,
    ],
    ids=["none", "name", "object", "class", "dict", "function"],
)
def test_initializers_go_through_json_and_back(initializer):
    written = table(initializer=initializer).get_config()
    read = json.loads(json.dumps(written))
    before = copy.deepcopy(read)
    again = tde.TableConfig.from_config(read)
    assert again.get_config() == written
    assert read == before
    layer = tde.DistributedEmbedding(tde.FeatureConfig("f", again))
    assert layer([1]).shape == (1, 4)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int32"])
def test_an_array_as_initializer_goes_through_json_bit_by_bit(dtype):
    values = np.random.default_rng(0).normal(size=[10, 4]) * 10
    array = np.asarray(tf.cast(values, dtype))
    text = json.dumps(table(initializer=array).get_config())
    again = tde.TableConfig.from_config(json.loads(text)).initializer
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


# -- FeatureConfig ------------------------------


def test_shapes_become_tuples():
    feature = tde.FeatureConfig("f", table(), [8, np.int64(3)], [8, 3, 4])
    assert feature.input_shape == (8, 3)
    assert feature.output_shape == (8, 3, 4)
    assert tde.FeatureConfig("f", table(), (None,)).input_shape == (None,)


BAD_FEATURES = [
    ({"name": None}, TypeError, ["FeatureConfig", "name", "NoneType"]),
    ({"name": "x/y"}, ValueError, ["FeatureConfig", "'x/y'"]),
    ({"table": "item"}, TypeError, ["table", "TableConfig", "'item'"]),
    ({"input_shape": 3}, TypeError, ["input_shape", "3", "tuple"]),
    ({"input_shape": ()}, ValueError, ["input_shape=()", "1 or 2", "batch"]),
    (
        {"input_shape": (8, 2, 2)},
        ValueError,
        ["input_shape=(8, 2, 2)", "1 or 2"],
    ),
    ({"input_shape": (0, 2)}, ValueError, ["input_shape=0", "at least 1"]),
    ({"input_shape": (8.0, 2)}, TypeError, ["input_shape", "8.0", "float"]),
    ({"input_shape": "ab"}, TypeError, ["input_shape", "'a'"]),
    ({"output_shape": (4,)}, ValueError, ["output_shape=(4,)", "2 or 3"]),
    (
        {"output_shape": (8, 5)},
        ValueError,
        ["output_shape=(8, 5)", "table 'item'", "embedding_dim", "4"],
    ),
    (
        {"output_shape": (8, 3, None)},
        ValueError,
        ["output_shape=(8, 3, None)", "4"],
    ),
    (
        {"input_shape": (8, 2), "output_shape": (9, 4)},
        ValueError,
        ["input_shape=(8, 2)", "output_shape=(9, 4)", "same global batch size"],
    ),
]


@pytest.mark.parametrize(
    "fields, error, parts", BAD_FEATURES, ids=lambda v: str(v)[:40]
)
def test_feature_config_refuses(fields, error, parts):
    if "name" not in fields:
        parts = ["Feature 'watched'", *parts]
    with pytest.raises(error) as caught:
        tde.FeatureConfig(**{"name": "watched", "table": table(), **fields})
    assert_says(caught, parts)


def test_a_feature_config_goes_through_json_and_back():
    feature = tde.FeatureConfig("watched", table(), (8, None), (8, 2, 4))
    written = feature.get_config()
    read = json.loads(json.dumps(written))
    before = copy.deepcopy(read)
    again = tde.FeatureConfig.from_config(read)
    assert read == before
    assert again.get_config() == written
    assert again.input_shape == (8, None)


# -- Read once, when the layer is made ----------


def test_changing_a_configuration_later_changes_nothing():
    item = table(initializer=np.ones([10, 4]), combiner="sum")
    feature = tde.FeatureConfig("f", item, [None, 3])
    configs = {"f": feature}
    policies = {"f": "drop"}
    stacks = [["item"]]
    layer = tde.DistributedEmbedding(
        configs, invalid_ids=policies, table_stacking=stacks
    )
    written = copy.deepcopy(layer.get_config())
    item.combiner = "mean"
    item.vocabulary_size = 3
    item.name = "other"
    feature.name = "g"
    feature.input_shape = (None, 1)
    configs["more"] = feature
    policies["f"] = "error"
    stacks[0].append("other")
    assert layer.get_config() == written
    output = layer({"f": tf.constant([[9, 9, 10]])})
    np.testing.assert_array_equal(output["f"], [[2.0] * 4])
    # Nor does what get_config returned.
    changed = layer.get_config()
    changed["invalid_ids"]["f"] = "error"
    changed["table_stacking"].clear()
    assert layer.get_config() == written


def test_a_configuration_that_was_spoilt_is_refused_by_the_layer():
    item = table()
    feature = tde.FeatureConfig("f", item)
    item.combiner = "max"
    with pytest.raises(ValueError, match="Table 'item': combiner must be"):
        tde.DistributedEmbedding(feature)
    item.combiner = "sum"
    feature.output_shape = (None, 7)
    with pytest.raises(ValueError, match="Feature 'f': output_shape must"):
        tde.DistributedEmbedding(feature)


# -- The layer's own arguments ------------------


def two_features() -> list[tde.FeatureConfig]:
    return [
        tde.FeatureConfig("f", table("item")),
        tde.FeatureConfig("g", table("user", embedding_dim=8)),
    ]


BAD_ARGUMENTS = [
    (
        {"invalid_ids": "ignore"},
        ValueError,
        ["Feature 'f'", "'error' or 'drop'", "'ignore'"],
    ),
    ({"invalid_ids": True}, TypeError, ["invalid_ids", "'drop'", "bool"]),
    (
        {"invalid_ids": {"h": "drop"}},
        ValueError,
        ["invalid_ids", "['h']", "['f', 'g']"],
    ),
    (
        {"invalid_ids": {"g": None}},
        ValueError,
        ["Feature 'g'", "'error' or 'drop'", "None"],
    ),
    (
        {"table_stacking": "all"},
        ValueError,
        ["table_stacking", "'auto', None", "'all'"],
    ),
    ({"table_stacking": 3}, TypeError, ["table_stacking", "3", "int"]),
    (
        {"table_stacking": [["item", "movie"]]},
        ValueError,
        ["table_stacking", "'movie'"],
    ),
    (
        {"table_stacking": [["item"], ["item", "user"]]},
        ValueError,
        ["table_stacking", "'item'"],
    ),
    (
        {"table_stacking": [["item", "user"]]},
        ValueError,
        ["table_stacking", "'item' and 'user'", "embedding_dim", "4", "8"],
    ),
    ({"update_stats": "no"}, TypeError, ["update_stats", "'no'", "str"]),
    (
        {"update_stats": True},
        ValueError,
        ["update_stats=True", "'sparsecore'", "Leave it out"],
    ),
    (
        {"pipeline_execution_with_tensor_core": 1},
        TypeError,
        ["pipeline_execution_with_tensor_core", "True or False", "1"],
    ),
    (
        {"pipeline_execution_with_tensor_core": True},
        ValueError,
        ["pipeline_execution_with_tensor_core=True", "'sparsecore'"],
    ),
    (
        {"sparse_core_embedding_config": native.SparseCoreEmbeddingConfig()},
        ValueError,
        ["sparse_core_embedding_config", "'sparsecore'"],
    ),
    (
        {"optimizer": "rmsprop"},
        ValueError,
        ["The layer's optimizer", "'rmsprop'", "'adagrad'"],
    ),
    (
        {"optimizer": keras.optimizers.Adam(clipvalue=1.0)},
        ValueError,
        ["The layer's optimizer", "clipvalue=1.0"],
    ),
]


@pytest.mark.parametrize(
    "arguments, error, parts", BAD_ARGUMENTS, ids=lambda v: str(v)[:40]
)
def test_the_layer_refuses(arguments, error, parts):
    with pytest.raises(error) as caught:
        tde.DistributedEmbedding(two_features(), **arguments)
    assert_says(caught, parts)


def test_two_features_of_one_name_are_refused():
    item = table()
    configs = [tde.FeatureConfig("f", item), tde.FeatureConfig("f", item)]
    with pytest.raises(ValueError) as caught:
        tde.DistributedEmbedding({"a": configs})
    assert_says(caught, ["Two features are named 'f'", "('a', 1)"])


def test_two_tables_of_one_name_are_refused():
    configs = [
        tde.FeatureConfig("f", table()),
        tde.FeatureConfig("g", table()),
    ]
    with pytest.raises(ValueError) as caught:
        tde.DistributedEmbedding(configs)
    assert_says(
        caught,
        ["Two tables are named 'item'", "'g'", "same TableConfig object"],
    )


def test_a_placement_that_is_not_there_is_refused_by_its_name():
    config = table(placement="sparsecore")
    with pytest.raises(ValueError) as caught:
        tde.DistributedEmbedding(tde.FeatureConfig("f", config))
    assert_says(caught, ["Table 'item'", "'sparsecore'", "default_device"])


def test_the_default_device_is_a_placement_everywhere():
    config = table(placement="default_device")
    layer = tde.DistributedEmbedding(tde.FeatureConfig("f", config))
    assert layer([1, 2]).shape == (2, 4)
    assert tde.DistributedEmbedding.has_sparsecores() is False


def test_the_layers_optimizer_is_that_of_tables_without_one():
    default = keras.optimizers.Adagrad(0.25)
    configs = [
        tde.FeatureConfig("f", table("item", optimizer=None)),
        tde.FeatureConfig("g", table("user", optimizer="sgd")),
    ]
    layer = tde.DistributedEmbedding(configs, optimizer=default)
    assert layer.table_optimizers["item"] is default
    assert isinstance(layer.table_optimizers["user"], keras.optimizers.SGD)
    without = tde.DistributedEmbedding(configs)
    assert list(without.table_optimizers) == ["user"]


def test_unusual_names_work():
    names = ["a b", "ä:ö", "x.y", "9", "values", "_t", "%s {}"]
    layer = tde.DistributedEmbedding(
        [
            tde.FeatureConfig(f"f {name}", table(name, embedding_dim=i + 1))
            for i, name in enumerate(names)
        ]
    )
    outputs = tf.function(layer)([tf.constant([1])] * len(names))
    assert [output.shape[1] for output in outputs] == [1, 2, 3, 4, 5, 6, 7]
    assert list(layer.get_embedding_tables()) == names
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=re.escape("'f %s {}': table '%s")
    ):
        layer([tf.constant([1])] * 6 + [tf.constant([11])])
