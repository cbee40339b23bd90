"""`tf.tpu.experimental.embedding` configurations, read as our own."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde

native = tf.tpu.experimental.embedding
IDS = tf.ragged.constant([[1, 1, 3], [], [4]], dtype=tf.int64)
ROWS = np.arange(20, dtype=np.float32).reshape(5, 4) / 7 + 0.25


def table(name: str | None = "t", **settings: Any) -> Any:
    settings.setdefault("vocabulary_size", 5)
    settings.setdefault("dim", 4)
    return native.TableConfig(name=name, **settings)


def feature(name: str | None = "f", **settings: Any) -> Any:
    settings.setdefault("table", table())
    return native.FeatureConfig(name=name, **settings)


def filled(layer: Any, rows: Any = ROWS) -> Any:
    layer.set_embedding_tables(
        dict.fromkeys(layer.get_embedding_tables(), rows)
    )
    return layer


def test_every_field_of_this_tensorflow_is_known() -> None:
    """A field that a new TensorFlow adds must be honoured or refused too."""
    known = {
        native.TableConfig: {
            "vocabulary_size",
            "dim",
            "initializer",
            "optimizer",
            "combiner",
            "name",
            "quantization_config",
            "layout",
            "dtype",
        },
        native.FeatureConfig: {
            "table",
            "max_sequence_length",
            "validate_weights_and_indices",
            "output_shape",
            "name",
        },
    }
    for kind, fields in known.items():
        parameters = set(inspect.signature(kind.__init__).parameters)
        assert parameters - {"self"} == fields


# -- The same layer as with our own configuration ----------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        native.SGD(0.5),
        native.Adagrad(0.5),
        native.AdagradMomentum(0.5),
        native.Adam(0.5),
        native.FTRL(0.5),
        keras.optimizers.Adagrad(0.5),
    ],
    ids=lambda optimizer: type(optimizer).__module__ + type(optimizer).__name__,
)
@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
def test_it_trains_as_with_our_own(optimizer: Any, combiner: str) -> None:
    theirs = tde.DistributedEmbedding(
        {"x": feature(table=table(optimizer=optimizer, combiner=combiner))}
    )
    ours = tde.DistributedEmbedding(
        {
            "x": tde.FeatureConfig(
                "f",
                tde.TableConfig(
                    "t", 5, 4, optimizer=optimizer, combiner=combiner
                ),
            )
        }
    )
    after = []
    for layer in (theirs, ours):
        filled(layer)
        rule = keras.optimizers.SGD(100.0)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer({"x": IDS})["x"] ** 2)
        variables = layer.trainable_variables
        rule.apply(tape.gradient(loss, variables), variables)
        after.append(layer.get_embedding_tables()["t"].numpy())
    np.testing.assert_array_equal(*after)
    assert not np.array_equal(after[0][1], ROWS[1])
    np.testing.assert_array_equal(after[0][[0, 2]], ROWS[[0, 2]])


def test_one_object_is_one_table() -> None:
    shared = table("movie")
    layer = tde.DistributedEmbedding(
        [
            feature("a", table=shared),
            feature("b", table=shared),
            feature("c", table=table("user")),
        ]
    )
    assert list(layer.get_embedding_tables()) == ["movie", "user"]


def test_tables_of_one_name_raise() -> None:
    with pytest.raises(ValueError, match="Two tables are named 't'"):
        tde.DistributedEmbedding(
            [feature("a", table=table()), feature("b", table=table())]
        )


def test_both_kinds_stand_beside_each_other() -> None:
    layer = tde.DistributedEmbedding(
        {
            "theirs": feature("theirs"),
            "ours": tde.FeatureConfig("ours", tde.TableConfig("u", 5, 4)),
        }
    )
    outputs = filled(layer)({"theirs": IDS, "ours": IDS})
    np.testing.assert_array_equal(outputs["theirs"], outputs["ours"])


def test_the_native_objects_stay_as_they_are() -> None:
    own = table(None)
    one = feature(None, table=own)
    before = dict(vars(own)), dict(vars(one))
    tde.DistributedEmbedding(one, optimizer=native.SGD(0.1))
    assert (dict(vars(own)), dict(vars(one))) == before


# -- Optimizers ----------------------------------


def test_a_table_without_an_optimizer_takes_the_layers() -> None:
    own, layers = native.Adagrad(0.1), native.SGD(0.5)
    layer = tde.DistributedEmbedding(
        [
            feature("a", table=table("a", optimizer=own)),
            feature("b", table=table("b")),
        ],
        optimizer=layers,
    )
    state = layer.get_optimizer_state()
    assert set(state["a"]) == {"accumulator", "step"}
    assert set(state["b"]) == {"step"}


def test_without_any_optimizer_the_models_trains_it() -> None:
    layer = tde.DistributedEmbedding(feature())
    assert dict(layer.table_optimizers) == {}
    assert layer.get_optimizer_state() == {}
    filled(layer)
    rule = keras.optimizers.SGD(1.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([2])))
    variables = layer.trainable_variables
    rule.apply(tape.gradient(loss, variables), variables)
    after = layer.get_embedding_tables()["t"]
    np.testing.assert_allclose(after[2], ROWS[2] - 1, rtol=1e-6)


def test_a_setting_of_an_optimizer_that_no_row_update_has_raises() -> None:
    with pytest.raises(ValueError, match="Table 't'.*clip_weight_min=-1"):
        tde.DistributedEmbedding(
            feature(table=table(optimizer=native.SGD(0.1, clip_weight_min=-1)))
        )


# -- Initial values ----------------------------------


def test_the_default_is_a_truncated_normal_of_one_over_the_root_of_dim() -> (
    None
):
    layer = tde.DistributedEmbedding(
        [
            feature(n, table=table(n, vocabulary_size=70_000, dim=16))
            for n in "ab"
        ]
    )
    a, b = (t.numpy() for t in layer.get_embedding_tables().values())
    # A normal of deviation s, cut at 2 s, has the deviation 0.8796 s.
    np.testing.assert_allclose(a.std(), 0.8796 / 4, rtol=0.01)
    assert 0.49 < np.abs(a).max() <= 0.5
    assert not np.array_equal(a[0], b[0])
    # Blocks of 65,536 rows are not repeated.
    assert not np.array_equal(a[0], a[65_536])


@pytest.mark.parametrize(
    "theirs, ours",
    [
        (
            tf.random_normal_initializer(1.0, 2.0, seed=3),
            keras.initializers.RandomNormal(1.0, 2.0, seed=3),
        ),
        (
            tf.random_uniform_initializer(1.0, 2.0, seed=3),
            keras.initializers.RandomUniform(1.0, 2.0, seed=3),
        ),
        (tf.constant_initializer(3.0), keras.initializers.Constant(3.0)),
        (tf.zeros_initializer(), keras.initializers.Zeros()),
        (tf.ones_initializer(), keras.initializers.Ones()),
        (
            keras.initializers.Orthogonal(seed=1),
            keras.initializers.Orthogonal(seed=1),
        ),
    ],
    ids=lambda law: type(law).__name__,
)
def test_tensorflows_laws_are_keras_laws(theirs: Any, ours: Any) -> None:
    layer = tde.DistributedEmbedding(feature(table=table(initializer=theirs)))
    expected = tde.DistributedEmbedding(
        tde.FeatureConfig("f", tde.TableConfig("t", 5, 4, initializer=ours))
    )
    np.testing.assert_array_equal(
        layer.get_embedding_tables()["t"], expected.get_embedding_tables()["t"]
    )
    again = tde.DistributedEmbedding.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()


@keras.saving.register_keras_serializable(package="tests")
def of_shape(shape: Any) -> Any:
    return ROWS[: shape[0], : shape[1]]


@keras.saving.register_keras_serializable(package="tests")
def of_shape_and_dtype(shape: Any, dtype: Any) -> Any:
    assert dtype == tf.float32
    return tf.constant(ROWS[: shape[0], : shape[1]], dtype)


@keras.saving.register_keras_serializable(package="tests")
def of_shape_and_anything(shape: Any, **kwargs: Any) -> Any:
    assert kwargs == {"dtype": tf.float32}
    return ROWS[: shape[0], : shape[1]]


@pytest.mark.parametrize(
    "function", [of_shape, of_shape_and_dtype, of_shape_and_anything]
)
def test_a_callable_draws_the_whole_table(function: Any) -> None:
    layer = tde.DistributedEmbedding(feature(table=table(initializer=function)))
    np.testing.assert_array_equal(layer.get_embedding_tables()["t"], ROWS)
    again = tde.DistributedEmbedding.from_config(layer.get_config())
    np.testing.assert_array_equal(again.get_embedding_tables()["t"], ROWS)


def test_row_ids_as_initial_values() -> None:
    layer = tde.DistributedEmbedding(
        feature(table=table(initializer=native.RowIdInitializer(offset=10)))
    )
    for one in (
        layer,
        tde.DistributedEmbedding.from_config(layer.get_config()),
    ):
        np.testing.assert_array_equal(
            one.get_embedding_tables()["t"],
            np.repeat(np.arange(10.0, 15.0)[:, np.newaxis], 4, axis=1),
        )


def test_a_callable_that_needs_a_shard_raises() -> None:
    def of_shard(shape: Any, dtype: Any, shard_info: Any) -> Any:
        raise AssertionError("not called")

    with pytest.raises(ValueError, match="Table 't'.*initializer.*shard_info"):
        tde.DistributedEmbedding(feature(table=table(initializer=of_shard)))


# -- Names ----------------------------------


def test_generated_names_follow_the_path() -> None:
    shared = table(None)
    layer = tde.DistributedEmbedding(
        {
            "user": {"id": feature(None, table=table(None))},
            "seen": [feature(None, table=shared), feature("x", table=shared)],
        }
    )
    config = layer.get_config()
    names = [(one["name"], one["table"]) for one in config["features"]]
    assert names == [
        ("user_id", "user_id_table"),
        ("seen_0", "seen_0_table"),
        ("x", "seen_0_table"),
    ]


def test_generated_names_keep_clear_of_each_other_and_of_given_ones() -> None:
    layer = tde.DistributedEmbedding(
        {
            "a": {"b/c": feature(None, table=table(None))},
            "a_b": {"c": feature(None, table=table(None))},
            "d": feature("a_b_c_3", table=table("a_b_c_table_2")),
            "a_b_c": tde.FeatureConfig(
                "a_b_c", tde.TableConfig("a_b_c_2_table", 5, 4)
            ),
        }
    )
    config = layer.get_config()
    names = [(one["name"], one["table"]) for one in config["features"]]
    assert names == [
        ("a_b_c_2", "a_b_c_2_table_2"),
        ("a_b_c_4", "a_b_c_4_table"),
        ("a_b_c_3", "a_b_c_table_2"),
        ("a_b_c", "a_b_c_2_table"),
    ]


def test_a_lone_feature_without_names() -> None:
    layer = tde.DistributedEmbedding(feature(None, table=table(None)))
    assert list(layer.get_embedding_tables()) == ["feature_table"]


# -- Shapes ----------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"max_sequence_length": 2},
        {"output_shape": [3, 2]},
        {"output_shape": [None, 2], "max_sequence_length": 2},
    ],
)
def test_sequences_are_not_combined(settings: Any) -> None:
    layer = filled(tde.DistributedEmbedding(feature(**settings)))
    expected = np.zeros([3, 2, 4], np.float32)
    expected[0] = ROWS[[1, 1]]  # the third id is cut
    expected[2, 0] = ROWS[4]
    np.testing.assert_array_equal(layer(IDS), expected)
    np.testing.assert_array_equal(layer(IDS.to_sparse()), expected)


@pytest.mark.parametrize("output_shape", [None, [3], [None]])
def test_other_features_are_combined(output_shape: Any) -> None:
    layer = filled(tde.DistributedEmbedding(feature(output_shape=output_shape)))
    assert layer(IDS).shape == (3, 4)


def test_a_replicas_batch_becomes_the_global_one(
    mirrored: tf.distribute.Strategy,
) -> None:
    with mirrored.scope():
        layer = tde.DistributedEmbedding(
            [
                feature("a", table=table("a"), output_shape=[8]),
                feature("b", table=table("b"), output_shape=[8, 3]),
                feature("c", table=table("c"), output_shape=[None, 3]),
            ]
        )
    shapes = [one["output_shape"] for one in layer.get_config()["features"]]
    assert shapes == [[16, 4], [16, 3, 4], [None, 3, 4]]


# -- Saving ----------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        native.SGD(0.3),
        native.Adagrad(0.3, initial_accumulator_value=0.2),
        native.AdagradMomentum(0.3, momentum=0.7),
        native.Adam(0.3, beta_1=0.8, sum_inside_sqrt=False),
        native.FTRL(0.3, l1_regularization_strength=0.01),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_a_saved_model_has_our_own_form(optimizer: Any, tmp_path: Any) -> None:
    seen = keras.Input([None], dtype="int64", ragged=True, name="seen")
    layer = tde.DistributedEmbedding(
        {"seen": feature(None, table=table(None, optimizer=optimizer))},
        name="embedding",
    )
    model = keras.Model({"seen": seen}, layer({"seen": seen})["seen"])
    expected = model({"seen": IDS})
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again({"seen": IDS}), expected)
    loaded = again.get_layer("embedding")
    assert list(loaded.get_embedding_tables()) == ["seen_table"]
    assert loaded.get_config() == layer.get_config()
    for settings in loaded.get_config()["optimizers"]:
        assert settings["class_name"].endswith(type(optimizer).__name__)
        for field, value in settings["config"].items():
            assert getattr(optimizer, field) == pytest.approx(value)


# -- What is refused ----------------------------------


def custom_combiner() -> Any:
    return native.CustomCombiner(
        tf.function(lambda valency, vectors: tf.reduce_sum(vectors, 0)), 4
    )


@pytest.mark.parametrize(
    "field, value",
    [
        ("combiner", custom_combiner),
        (
            "quantization_config",
            lambda: native.QuantizationConfig(256, -1.0, 1.0),
        ),
        ("layout", object),
        ("dtype", lambda: tf.int32),
    ],
)
def test_fields_of_a_table_that_raise(field: str, value: Any) -> None:
    one = feature(table=table("movie", **{field: value()}))
    with pytest.raises(
        ValueError, match=f"Table 'movie'.*TableConfig.*{field}"
    ):
        tde.DistributedEmbedding({"x": one})


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"validate_weights_and_indices": False},
            "validate_weights_and_indices=False. There is no lookup without",
        ),
        ({"output_shape": []}, "output_shape"),
        ({"output_shape": [2, 3, 4]}, "output_shape"),
        (
            {"output_shape": [2, 3], "max_sequence_length": 4},
            "output_shape.*max_sequence_length=4",
        ),
        (
            {"output_shape": [2], "max_sequence_length": 4},
            "output_shape.*max_sequence_length=4",
        ),
        (
            {"output_shape": [2, None], "max_sequence_length": 4},
            "output_shape.*max_sequence_length=4",
        ),
    ],
)
def test_fields_of_a_feature_that_raise(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"Feature 'seen'.*{message}"):
        tde.DistributedEmbedding(feature("seen", **settings))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_layer_dtype_that_is_not_the_tables_raises(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"Table 't'.*dtype.*{dtype}"):
        tde.DistributedEmbedding(feature(), dtype=dtype)


def test_a_mixed_policy_keeps_float32_tables() -> None:
    layer = tde.DistributedEmbedding(feature(), dtype="mixed_bfloat16")
    assert layer.get_embedding_tables()["t"].dtype == tf.float32
    assert layer(IDS).dtype == tf.bfloat16


def test_reading_them_warns_of_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """TensorFlow warns when its table is made without a name, not we."""
    one = feature(None, table=table(None))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        tde.DistributedEmbedding(one)
    assert caplog.records == []
