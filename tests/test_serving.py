"""`export_for_serving`: the same answers, with nothing but TensorFlow."""

from __future__ import annotations

import collections
import json
import pathlib
import subprocess
import sys
import textwrap
import types
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

import tf_distembed as tde

RAGGED = tf.ragged.constant([[1, 1, 3], [], [4]], dtype=tf.int64)
SPARSE = tf.SparseTensor(
    [[0, 0], [0, 2], [2, 1]], tf.constant([2, 4, 1], tf.int64), [3, 3]
)
DENSE = tf.constant([3, 0, 3])
WIDE = tf.constant([[1, 2], [0, 0], [4, 3]], tf.int64)


def table(name: str, dim: int = 4, **settings: Any) -> tde.TableConfig:
    settings = {"optimizer": "adagrad", **settings}
    rows = settings.pop("rows", 5)
    return tde.TableConfig(name, rows, dim, **settings)


def feature(name: str, of: tde.TableConfig, **settings: Any) -> Any:
    return tde.FeatureConfig(name, of, **settings)


def every_kind(**settings: Any) -> tuple[Any, Any]:
    """A model of each kind of input, and a batch for it."""
    item = table("item")
    layer = tde.DistributedEmbedding(
        {
            "seen": feature("seen", item),
            "tags": feature("tags", table("tags", 2, combiner="sqrtn")),
            "next": feature("next", item),
            "last": feature("last", table("last", 3, combiner="sum")),
        },
        name="embedding",
        **settings,
    )
    inputs = {
        "seen": keras.Input([None], dtype="int64", ragged=True, name="seen"),
        "tags": keras.Input([None], dtype="int64", sparse=True, name="tags"),
        "next": keras.Input([], dtype="int32", name="next"),
        "last": keras.Input([2], dtype="int64", name="last"),
    }
    outputs = layer(inputs)
    x = keras.layers.Concatenate()(list(outputs.values()))
    model = keras.Model(
        inputs,
        {"score": keras.layers.Dense(1)(x), "seen": outputs["seen"]},
    )
    batch = {"seen": RAGGED, "tags": SPARSE, "next": DENSE, "last": WIDE}
    return model, batch


def trained(model: Any, batch: Any, optimizer: Any = None) -> Any:
    """A step, so that slots and weights are no longer what they were."""
    optimizer = optimizer or keras.optimizers.Adam(0.1)
    with tf.GradientTape() as tape:
        outputs = tf.nest.flatten(model(batch, training=True))
        loss = tf.add_n([tf.reduce_sum(x**2) for x in outputs])
    variables = model.trainable_variables
    optimizer.apply(tape.gradient(loss, variables), variables)
    return model


def flat(name: str, value: Any) -> dict[str, Any]:
    """An input as its signature takes it."""
    if isinstance(value, tf.RaggedTensor):
        return {
            f"{name}_values": value.values,
            f"{name}_row_splits": value.row_splits,
        }
    if isinstance(value, tf.SparseTensor):
        return {
            f"{name}_indices": value.indices,
            f"{name}_values": value.values,
            f"{name}_dense_shape": value.dense_shape,
        }
    return {name: value}


def flat_batch(batch: Any) -> dict[str, Any]:
    return {k: v for name in batch for k, v in flat(name, batch[name]).items()}


def load(directory: Any) -> Any:
    loaded = tf.saved_model.load(str(directory))
    served = loaded.signatures["serving_default"]
    served.kept_alive = loaded
    return served


def assert_serves(model: Any, batch: Any, directory: Any) -> None:
    """The export of a model with named outputs answers as the model does."""
    expected = model(batch, training=False)
    actual = load(directory)(**flat_batch(batch))
    assert set(actual) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def stored(directory: Any) -> dict[tuple[int, ...], str]:
    """Shape -> dtype of every array that is in the SavedModel's files."""
    reader = tf.train.load_checkpoint(str(directory / "variables/variables"))
    shapes = reader.get_variable_to_shape_map()
    dtypes = reader.get_variable_to_dtype_map()
    return {
        tuple(shape): dtypes[name].name
        for name, shape in shapes.items()
        if name != "_CHECKPOINTABLE_OBJECT_GRAPH"
    }


# -- The same answers ----------------------------------


@pytest.mark.parametrize("steps", [0, 2])
def test_every_kind_of_input(steps: int, tmp_path: pathlib.Path) -> None:
    model, batch = every_kind()
    for _ in range(steps):
        trained(model, batch)
    tde.export_for_serving(model, tmp_path / "1")
    assert_serves(model, batch, tmp_path / "1")
    # Another batch size, with empty rows at its end.
    batch = {
        "seen": tf.ragged.constant([[2], []], dtype=tf.int64),
        "tags": tf.SparseTensor([[0, 0]], tf.constant([4], tf.int64), [2, 9]),
        "next": DENSE[:2],
        "last": WIDE[:2],
    }
    assert_serves(model, batch, tmp_path / "1")


def test_per_position_outputs_and_cut_rows(tmp_path: pathlib.Path) -> None:
    layer = tde.DistributedEmbedding(
        {
            "seen": feature("seen", table("item"), output_shape=(None, 2, 4)),
            "cut": feature("cut", table("cut"), input_shape=(None, 1)),
        }
    )
    inputs = {
        name: keras.Input([None], dtype="int64", ragged=True, name=name)
        for name in ("seen", "cut")
    }
    model = keras.Model(inputs, layer(inputs))
    tde.export_for_serving(model, tmp_path / "1")
    assert_serves(model, {"seen": RAGGED, "cut": RAGGED}, tmp_path / "1")


def test_weights_are_inputs_like_others(tmp_path: pathlib.Path) -> None:
    layer = tde.DistributedEmbedding({"seen": feature("s", table("item"))})
    inputs = {
        "seen": keras.Input([None], dtype="int64", ragged=True, name="seen"),
        "weight": keras.Input([None], ragged=True, name="weight"),
    }
    outputs = layer(
        {"seen": inputs["seen"]}, weights={"seen": inputs["weight"]}
    )
    model = keras.Model(inputs, outputs)
    tde.export_for_serving(model, tmp_path / "1")
    weights = RAGGED.with_values(tf.constant([0.5, 2.0, -1.0, 3.0]))
    assert_serves(model, {"seen": RAGGED, "weight": weights}, tmp_path / "1")


def test_preprocess_within_the_model(tmp_path: pathlib.Path) -> None:
    layer = tde.DistributedEmbedding({"next": feature("n", table("item"))})
    inputs = {"next": keras.Input([], dtype="int64", name="next")}
    model = keras.Model(inputs, layer(layer.preprocess(inputs)))
    tde.export_for_serving(model, tmp_path / "1")
    ids = {"next": tf.constant([1, 4], tf.int64)}
    assert_serves(model, ids, tmp_path / "1")


def test_tables_of_every_sort(tmp_path: pathlib.Path) -> None:
    """Several layers, frozen tables, the model's own, and EmbedReduce."""
    seen = keras.Input([None], dtype="int64", ragged=True, name="seen")
    both = [
        tde.DistributedEmbedding(
            {
                "a": feature("a", table("item", optimizer=optimizer)),
                "b": feature("b", table("other", 3, trainable=trainable)),
            },
            name=name,
        )({"a": seen, "b": seen})
        for name, optimizer, trainable in [
            ("first", None, True),
            ("second", "adam", False),
        ]
    ]
    parts = [x for outputs in both for x in outputs.values()]
    parts.append(tde.EmbedReduce(5, 6, combiner="sqrtn", name="tags")(seen))
    parts.append(tde.EmbedReduce(5, 7, mask_zero=True, name="padded")(seen))
    outputs = {"x": keras.layers.Concatenate()(parts)}
    model = keras.Model({"seen": seen}, outputs)
    trained(model, {"seen": RAGGED})
    report = tde.export_for_serving(model, tmp_path / "1")
    assert_serves(model, {"seen": RAGGED}, tmp_path / "1")
    names = {(one.layer, one.table) for one in report.tables}
    assert names == {
        ("first", "item"),
        ("first", "other"),
        ("second", "item"),
        ("second", "other"),
        ("tags", "embeddings"),
        ("padded", "embeddings"),
    }


def test_lora_is_merged(tmp_path: pathlib.Path) -> None:
    ids = keras.Input([2], dtype="int64", name="ids")
    layer = tde.EmbedReduce(5, 4)
    model = keras.Model({"ids": ids}, {"x": layer(ids)})
    layer.enable_lora(2)
    layer.lora_embeddings_b.assign(np.ones([2, 4], np.float32))
    tde.export_for_serving(model, tmp_path / "1")
    assert_serves(model, {"ids": WIDE}, tmp_path / "1")
    assert stored(tmp_path / "1") == {(5, 4): "float32"}


def test_lookup_tables_of_strings_come_along(tmp_path: pathlib.Path) -> None:
    word = keras.Input([2], dtype="string", name="word")
    vocabulary = keras.layers.StringLookup(vocabulary=["a", "b", "c"])
    ids = vocabulary(word)
    layer = tde.DistributedEmbedding({"word": feature("w", table("word"))})
    model = keras.Model({"word": word}, layer({"word": ids}))
    tde.export_for_serving(model, tmp_path / "1")
    words = tf.constant([["a", "c"], ["b", "unknown"]])
    assert_serves(model, {"word": words}, tmp_path / "1")


def test_a_mixed_policy(tmp_path: pathlib.Path) -> None:
    layer = tde.DistributedEmbedding(
        {"seen": feature("s", table("item"))}, dtype="mixed_bfloat16"
    )
    seen = keras.Input([None], dtype="int64", ragged=True, name="seen")
    model = keras.Model({"seen": seen}, layer({"seen": seen}))
    tde.export_for_serving(model, tmp_path / "1")
    outputs = load(tmp_path / "1")(**flat("seen", RAGGED))
    assert outputs["seen"].dtype == tf.bfloat16
    np.testing.assert_array_equal(
        tf.cast(outputs["seen"], tf.float32),
        tf.cast(model({"seen": RAGGED})["seen"], tf.float32),
    )


@pytest.mark.parametrize("policy", ["error", "drop"])
@pytest.mark.parametrize("kind", ["seen", "tags", "next", "last"])
def test_bad_ids_are_treated_as_by_the_model(
    kind: str, policy: str, tmp_path: pathlib.Path
) -> None:
    model, batch = every_kind(invalid_ids=policy)
    tde.export_for_serving(model, tmp_path / "1")
    bad = {
        "seen": tf.ragged.constant([[1, 5], [-1], [4]], dtype=tf.int64),
        "tags": SPARSE.with_values(tf.constant([2, 2**32 + 1, 1], tf.int64)),
        "next": tf.constant([3, -7, 5]),
        "last": tf.constant([[1, 9], [-1, 7], [4, 3]], tf.int64),
    }
    batch = {**batch, kind: bad[kind]}
    if policy == "drop":
        assert_serves(model, batch, tmp_path / "1")
        return
    name = "tags" if kind == "tags" else kind
    message = f"Feature .*{name}.*vocabulary_size=5.*Received: id"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        model(batch)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        load(tmp_path / "1")(**flat_batch(batch))


def test_malformed_row_splits_are_an_error_not_a_crash(
    tmp_path: pathlib.Path,
) -> None:
    model, batch = every_kind()
    tde.export_for_serving(model, tmp_path / "1")
    given = flat_batch(batch)
    given["seen_row_splits"] = tf.constant([0, 3, 2, 9], tf.int64)
    with pytest.raises(tf.errors.InvalidArgumentError):
        load(tmp_path / "1")(**given)


def test_after_an_export_the_model_trains_as_before(
    tmp_path: pathlib.Path,
) -> None:
    exported, batch = every_kind()
    left_alone, _ = every_kind()
    left_alone.set_weights(exported.get_weights())
    tde.export_for_serving(exported, tmp_path / "1", row_dtype="bfloat16")
    for model in (exported, left_alone):
        trained(model, batch)
    for one, other in zip(
        exported.get_weights(), left_alone.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, other)


# -- Where it was trained ----------------------------------


def test_replicas_give_the_first_ones_values(
    mirrored: tf.distribute.Strategy, tmp_path: pathlib.Path
) -> None:
    with mirrored.scope():
        model, batch = every_kind()
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)

        @tf.function
        def step() -> None:
            mirrored.run(trained, args=(model, batch, optimizer))

        step()
    report = tde.export_for_serving(model, tmp_path / "1")
    assert len(report.tables) == 3
    assert_serves(model, batch, tmp_path / "1")
    tde.export_for_serving(model, tmp_path / "2", row_dtype="bfloat16")
    assert stored(tmp_path / "2")[5, 3] == "bfloat16"


def test_inside_a_scope_it_raises(
    mirrored: tf.distribute.Strategy, tmp_path: pathlib.Path
) -> None:
    model, _ = every_kind()
    with (
        mirrored.scope(),
        pytest.raises(RuntimeError, match="outside strategy.scope"),
    ):
        tde.export_for_serving(model, tmp_path / "1")


@pytest.mark.parametrize("row_dtype", ["float32", "bfloat16"])
def test_tables_of_sparsecores(row_dtype: str, tmp_path: pathlib.Path) -> None:
    """Trained by TPUEmbeddingV2, served on the CPU."""
    with (
        tde.testing.sparsecore_emulator(1, 2) as strategy,
        strategy.scope(),
    ):
        layer = tde.DistributedEmbedding(
            {
                "seen": feature(
                    "seen",
                    table("item", combiner="sum"),
                    output_shape=(4, 4),
                ),
                "local": feature(
                    "local", table("local", placement="default_device")
                ),
            }
        )
        dense = keras.layers.Dense(2)
        dense.build([None, 8])

        class Model(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.dense = layer, dense
                self.built = True

            def call(self, inputs: Any, training: bool = False) -> Any:
                found = self.layer(inputs, training=training)
                x = tf.concat([found["seen"], found["local"]], 1)
                return {"score": self.dense(x), "seen": found["seen"]}

        model = Model()
        batch = {
            "seen": tf.ragged.constant([[1, 1, 3], [], [4], []], tf.int64),
            "local": tf.constant([[1], [2], [0], [4]], tf.int64),
        }

        @tf.function
        def step(inputs: Any) -> None:
            def train(inputs: Any) -> None:
                with tf.GradientTape() as tape:
                    outputs = model(inputs, training=True)
                    loss = tf.reduce_sum(outputs["score"] ** 2)
                variables = model.trainable_variables
                tape.gradient(loss, variables)

            strategy.run(train, args=(inputs,))

        step(batch)
        tables = layer.get_embedding_tables()
        kernel = dense.kernel.value.values[0].numpy()
    tde.export_for_serving(
        model,
        tmp_path / "1",
        signature={
            "seen": tf.RaggedTensorSpec([None, None], tf.int64),
            "local": tf.TensorSpec([None, 1], tf.int64),
        },
        row_dtype=row_dtype,
    )
    rows, local = (
        tf.cast(tf.cast(tables[name], row_dtype), tf.float32).numpy()
        for name in ("item", "local")
    )
    seen = np.stack([rows[bag].sum(0) for bag in ([1, 1, 3], [], [4], [])])
    found = np.concatenate([seen, local[[1, 2, 0, 4]]], 1)
    outputs = load(tmp_path / "1")(**flat_batch(batch))
    np.testing.assert_allclose(outputs["seen"], seen, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        outputs["score"], found @ kernel, rtol=1e-5, atol=1e-6
    )


# -- What is in the files ----------------------------------


def test_no_slots_are_exported(tmp_path: pathlib.Path) -> None:
    model, batch = every_kind()
    model.compile("adam", "mse")
    trained(model, batch, model.optimizer)
    tde.export_for_serving(model, tmp_path / "1")
    assert stored(tmp_path / "1") == {
        (5, 4): "float32",
        (5, 2): "float32",
        (5, 3): "float32",
        (13, 1): "float32",
        (1,): "float32",
    }


def test_tables_are_no_constants_and_never_read_whole(
    tmp_path: pathlib.Path,
) -> None:
    sorts = {
        "own": {"optimizer": "adam"},
        "models": {"optimizer": None},
        "frozen": {"trainable": False},
        "array": {"initializer": np.ones([200_000, 8], np.float32)},
    }
    layer = tde.DistributedEmbedding(
        {
            k: feature(k, table(k, 8, rows=200_000, **v))
            for k, v in sorts.items()
        }
    )
    ids = {k: keras.Input([3], dtype="int64", name=k) for k in sorts}
    outputs = layer(ids)
    outputs["reduced"] = tde.EmbedReduce(200_000, 8)(ids["own"])
    model = keras.Model(ids, outputs)
    for row_dtype in ("float32", "bfloat16"):
        directory = tmp_path / row_dtype
        tde.export_for_serving(model, directory, row_dtype=row_dtype)
        file = directory / "saved_model.pb"
        assert file.stat().st_size < 2**20 < 200_000 * 8 * 2
        saved = saved_model_pb2.SavedModel.FromString(file.read_bytes())
        graph = saved.meta_graphs[0].graph_def
        nodes = [n for f in graph.library.function for n in f.node_def]
        nodes += graph.node
        constants = [n for n in nodes if n.op == "Const"]
        assert constants
        for node in constants:
            shape = node.attr["value"].tensor.tensor_shape
            assert np.prod([d.size for d in shape.dim] or [1]) < 1_000
        # Only gathers touch the variables: a request costs what its ids cost.
        served = load(directory)
        operations = _all_operations(served.graph)
        assert sum(op.type == "ResourceGather" for op in operations) == 5
        assert not any(op.type == "ReadVariableOp" for op in operations)


def _all_operations(graph: Any) -> list[Any]:
    """Those of a graph and of the functions that it calls."""
    found = list(graph.get_operations())
    names = {
        name
        for name in graph.as_graph_def().library.function
        for name in [name.signature.name]
    }
    library = {
        f.signature.name: f for f in graph.as_graph_def().library.function
    }
    for name in names:
        found += [
            types.SimpleNamespace(type=node.op, name=node.name)
            for node in library[name].node_def
        ]
    return found


@pytest.mark.parametrize("row_dtype", ["float16", "bfloat16"])
def test_narrow_rows_are_cast_after_they_are_read(
    row_dtype: str, tmp_path: pathlib.Path
) -> None:
    seen = keras.Input([None], dtype="int64", ragged=True, name="seen")
    layer = tde.DistributedEmbedding({"seen": feature("s", table("item"))})
    reduce = tde.EmbedReduce(5, 3, combiner="sum")
    plain = keras.layers.Embedding(5, 2)
    ids = keras.Input([2], dtype="int64", name="ids")
    model = keras.Model(
        {"seen": seen, "ids": ids},
        {
            "item": layer({"seen": seen})["seen"],
            "reduced": reduce(seen),
            "plain": plain(ids),
        },
    )
    report = tde.export_for_serving(model, tmp_path / "1", row_dtype=row_dtype)
    assert [one.dtype for one in report.tables] == [row_dtype] * 2
    # A plain Embedding is no table of ours.
    assert stored(tmp_path / "1") == {
        (5, 4): row_dtype,
        (5, 3): row_dtype,
        (5, 2): "float32",
    }
    for variable in (layer.weights[0], reduce.embeddings):
        rounded = tf.cast(tf.cast(variable.numpy(), row_dtype), tf.float32)
        assert not np.array_equal(rounded, variable.numpy())
        variable.assign(rounded)
    # As if the model had these rows: combined in float32.
    assert_serves(model, {"seen": RAGGED, "ids": WIDE}, tmp_path / "1")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_float32_keeps_tables_as_they_are(
    dtype: str, tmp_path: pathlib.Path
) -> None:
    layer = tde.DistributedEmbedding(
        {"seen": feature("s", table("item"))}, dtype=dtype
    )
    seen = keras.Input([None], dtype="int64", ragged=True, name="seen")
    model = keras.Model({"seen": seen}, layer({"seen": seen}))
    tde.export_for_serving(model, tmp_path / "1")
    assert stored(tmp_path / "1") == {(5, 4): dtype}


def test_values_too_large_for_float16_raise(tmp_path: pathlib.Path) -> None:
    model, _ = every_kind()
    rows = np.ones([5, 3], np.float32)
    rows[2, 1] = -7e4
    model.get_layer("embedding").set_embedding_tables({"last": rows})
    with pytest.raises(
        ValueError, match="Layer 'embedding', table 'last'.*7e.04.*float16"
    ):
        tde.export_for_serving(model, tmp_path / "1", row_dtype="float16")
    assert not list(tmp_path.iterdir())
    tde.export_for_serving(model, tmp_path / "1", row_dtype="bfloat16")


# -- Names and signatures ----------------------------------


def names(model: Any, directory: Any, **settings: Any) -> tuple[Any, Any]:
    report = tde.export_for_serving(model, directory, **settings)
    return (
        {one.name for one in report.inputs},
        {one.name for one in report.outputs},
    )


def lookup(ids: Any, **settings: Any) -> Any:
    return tde.DistributedEmbedding(feature("f", table("t")), **settings)(ids)


def test_a_lone_input_has_its_own_name(tmp_path: pathlib.Path) -> None:
    seen = keras.Input([2], dtype="int64", name="seen")
    model = keras.Model(seen, lookup(seen))
    assert names(model, tmp_path / "1") == ({"seen"}, {"output_0"})
    unnamed = keras.Input([2], dtype="int64")
    model = keras.Model(unnamed, lookup(unnamed))
    assert names(model, tmp_path / "2") == ({"inputs"}, {"output_0"})
    model = keras.Sequential([unnamed, tde.EmbedReduce(5, 4)])
    assert names(model, tmp_path / "3") == ({"inputs"}, {"output_0"})
    outputs = load(tmp_path / "3")(inputs=WIDE)
    np.testing.assert_array_equal(outputs["output_0"], model(WIDE))


def test_lists_take_the_names_of_their_inputs(tmp_path: pathlib.Path) -> None:
    inputs = [
        keras.Input([2], dtype="int64", name="input_7"),
        keras.Input([2], dtype="int64"),
    ]
    model = keras.Model(inputs, [lookup(one) for one in inputs])
    assert names(model, tmp_path / "1") == (
        {"input_7", "input_1"},
        {"output_0", "output_1"},
    )
    outputs = load(tmp_path / "1")(input_7=WIDE, input_1=WIDE[::-1])
    expected = model([WIDE, WIDE[::-1]])
    np.testing.assert_array_equal(outputs["output_0"], expected[0])
    np.testing.assert_array_equal(outputs["output_1"], expected[1])


Pair = collections.namedtuple("Pair", ["left", "right"])


class Nested(keras.Model):
    """Takes and gives nested structures."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = tde.DistributedEmbedding(
            {
                "user": {"id": feature("id", table("user"))},
                "seen": Pair(
                    feature("l", table("left")), feature("r", table("right"))
                ),
                "tags": [feature("t", table("tags"))],
            }
        )

    def call(self, inputs: Any) -> Any:
        return self.lookup(inputs)


def test_nested_structures_join_their_keys(tmp_path: pathlib.Path) -> None:
    model = Nested()
    batch = {
        "user": {"id": DENSE},
        "seen": Pair(RAGGED, WIDE),
        "tags": [SPARSE],
    }
    expected = model(batch)
    signature = {
        "user": {"id": tf.TensorSpec([None], tf.int32)},
        "seen": Pair(
            tf.RaggedTensorSpec([None, None], tf.int64),
            keras.Input([2], dtype="int64"),
        ),
        "tags": [tf.SparseTensorSpec([None, None], tf.int64)],
    }
    inputs, outputs = names(model, tmp_path / "1", signature=signature)
    assert inputs == {
        "user_id",
        "seen_left_values",
        "seen_left_row_splits",
        "seen_right",
        "tags_0_indices",
        "tags_0_values",
        "tags_0_dense_shape",
    }
    assert outputs == {"user_id", "seen_left", "seen_right", "tags_0"}
    served = load(tmp_path / "1")(
        user_id=DENSE,
        seen_right=WIDE,
        **flat("seen_left", RAGGED),
        **flat("tags_0", SPARSE),
    )
    np.testing.assert_array_equal(served["user_id"], expected["user"]["id"])
    np.testing.assert_array_equal(served["seen_left"], expected["seen"].left)
    np.testing.assert_array_equal(served["seen_right"], expected["seen"].right)
    np.testing.assert_array_equal(served["tags_0"], expected["tags"][0])


def test_a_layer_alone_is_served(tmp_path: pathlib.Path) -> None:
    layer = tde.DistributedEmbedding(feature("seen", table("item")))
    signature = tf.RaggedTensorSpec([None, None], tf.int64)
    assert names(layer, tmp_path / "1", signature=signature) == (
        {"inputs_values", "inputs_row_splits"},
        {"output_0"},
    )
    outputs = load(tmp_path / "1")(**flat("inputs", RAGGED))
    np.testing.assert_array_equal(outputs["output_0"], layer(RAGGED))


def test_a_signature_may_say_more_than_the_model(
    tmp_path: pathlib.Path,
) -> None:
    model, batch = every_kind()
    signature = {
        "seen": tf.RaggedTensorSpec(
            [3, None], tf.int32, row_splits_dtype=tf.int32
        ),
        "tags": tf.SparseTensorSpec([3, 3], tf.int64),
        "next": tf.TensorSpec([3], tf.int64, name="ignored beside a key"),
        "last": keras.Input([2], batch_size=3, dtype="int64"),
    }
    report = tde.export_for_serving(model, tmp_path / "1", signature=signature)
    inputs = {one.name: (one.dtype, one.shape) for one in report.inputs}
    assert inputs == {
        "seen_values": ("int32", (None,)),
        "seen_row_splits": ("int32", (4,)),
        "tags_indices": ("int64", (None, 2)),
        "tags_values": ("int64", (None,)),
        "tags_dense_shape": ("int64", (2,)),
        "next": ("int64", (3,)),
        "last": ("int64", (3, 2)),
    }
    given = flat_batch(batch)
    given["next"] = tf.cast(given["next"], tf.int64)
    for part in ("seen_values", "seen_row_splits"):
        given[part] = tf.cast(given[part], tf.int32)
    outputs = load(tmp_path / "1")(**given)
    np.testing.assert_array_equal(outputs["score"], model(batch)["score"])


def test_names_that_a_signature_cannot_have(tmp_path: pathlib.Path) -> None:
    keys = ["user id", "1st", "_x", "class", "self", "xÜï-code"]
    layer = tde.DistributedEmbedding(
        {k: feature(f"f{i}", table(f"t{i}")) for i, k in enumerate(keys)}
    )
    model = ByKey(layer)
    model(dict.fromkeys(keys, WIDE))
    signature = {k: tf.TensorSpec([None, 2], tf.int64) for k in keys}
    expected = {"user_id", "arg_1st", "arg__x", "class_", "self_", "x___code"}
    assert names(model, tmp_path / "1", signature=signature) == (
        expected,
        expected,
    )
    outputs = load(tmp_path / "1")(**dict.fromkeys(expected, WIDE))
    np.testing.assert_array_equal(
        outputs["user_id"], model(dict.fromkeys(keys, WIDE))["user id"]
    )


class ByKey(keras.Model):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def call(self, inputs: Any) -> Any:
        return self.layer(inputs)


def test_two_inputs_or_outputs_of_one_name_raise(
    tmp_path: pathlib.Path,
) -> None:
    layer = tde.DistributedEmbedding(
        {"a b": feature("a", table("a")), "a-b": feature("b", table("b"))}
    )
    model = ByKey(layer)
    model({"a b": WIDE, "a-b": WIDE})
    spec = tf.TensorSpec([None, 2], tf.int64)
    with pytest.raises(ValueError, match=r"Two inputs .*\['a_b'\].*signature"):
        tde.export_for_serving(
            model, tmp_path / "1", signature={"a b": spec, "a-b": spec}
        )

    class Outputs(keras.layers.Layer):
        def call(self, ids: Any) -> Any:
            return {"a b": ids, "a-b": ids}

    one = Outputs()
    one(WIDE)
    with pytest.raises(ValueError, match=r"Two outputs .*\['a_b'\]"):
        tde.export_for_serving(one, tmp_path / "1", signature=spec)


def test_ragged_and_sparse_outputs(tmp_path: pathlib.Path) -> None:
    class Outputs(keras.layers.Layer):
        def call(self, ids: Any) -> Any:
            return {"r": ids, "s": ids.to_sparse()}

    model = Outputs()
    model(RAGGED)
    signature = tf.RaggedTensorSpec([None, None], tf.int64)
    tde.export_for_serving(model, tmp_path / "1", signature=signature)
    outputs = load(tmp_path / "1")(**flat("inputs", RAGGED))
    expected = {**flat("r", RAGGED), **flat("s", RAGGED.to_sparse())}
    assert set(outputs) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(outputs[name], value)


def test_an_output_that_is_no_tensor_raises(tmp_path: pathlib.Path) -> None:
    class Outputs(keras.layers.Layer):
        def call(self, ids: Any) -> Any:
            return {"x": ids, "y": None}

    model = Outputs()
    model.built = True
    with pytest.raises(ValueError, match="output 'y' cannot be served.*None"):
        tde.export_for_serving(
            model, tmp_path / "1", signature=tf.TensorSpec([None], tf.int64)
        )


# -- The directory ----------------------------------


def test_an_empty_directory_and_missing_parents_are_fine(
    tmp_path: pathlib.Path,
) -> None:
    model, batch = every_kind()
    (tmp_path / "empty").mkdir()
    for directory in (tmp_path / "empty", tmp_path / "a" / "b" / "1"):
        tde.export_for_serving(model, str(directory))
        assert_serves(model, batch, directory)
        # Nothing else is left there, and others may read it.
        assert [
            one.name
            for one in directory.parent.iterdir()
            if one.name.startswith(".")
        ] == []
        assert directory.stat().st_mode & 0o777 == (
            (tmp_path / "a").stat().st_mode & 0o777
            if (tmp_path / "a").exists()
            else directory.stat().st_mode & 0o777
        )


def test_what_exists_is_not_overwritten(tmp_path: pathlib.Path) -> None:
    model, _ = every_kind()
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "file").write_text("mine")
    (tmp_path / "2").write_text("mine")
    for target in (tmp_path / "1", tmp_path / "2"):
        with pytest.raises(FileExistsError, match="not an empty directory"):
            tde.export_for_serving(model, target)
    assert (tmp_path / "1" / "file").read_text() == "mine"
    assert (tmp_path / "2").read_text() == "mine"


def test_a_failure_leaves_nothing_behind(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = every_kind()
    save = tf.saved_model.save

    def fails_late(module: Any, directory: str, **settings: Any) -> None:
        save(module, directory, **settings)
        raise OSError("the disk is full")

    monkeypatch.setattr(tf.saved_model, "save", fails_late)
    with pytest.raises(OSError, match="the disk is full"):
        tde.export_for_serving(model, tmp_path / "1")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    tde.export_for_serving(model, tmp_path / "1")
    assert_serves(model, batch, tmp_path / "1")


# -- The report ----------------------------------


def test_the_report(tmp_path: pathlib.Path) -> None:
    model, _ = every_kind()
    report = tde.export_for_serving(model, tmp_path / "1")
    assert report.directory == str(tmp_path / "1")
    assert report.signature == "serving_default"
    assert report.disk_bytes == sum(
        f.stat().st_size for f in (tmp_path / "1").rglob("*") if f.is_file()
    )
    assert report.other_bytes == 4 * (13 + 1)
    tables = {
        one.table: (one.layer, one.rows, one.dim, one.dtype, one.bytes)
        for one in report.tables
    }
    assert tables == {
        "item": ("embedding", 5, 4, "float32", 80),
        "tags": ("embedding", 5, 2, "float32", 40),
        "last": ("embedding", 5, 3, "float32", 60),
    }
    lines = str(report).splitlines()
    assert lines[0].startswith(f"SavedModel in {tmp_path / '1'} (")
    cells = [line.split() for line in lines[1:]]
    assert ["input", "seen_values", "int64", "[None]"] in cells
    assert ["input", "last", "int64", "[None,", "2]"] in cells
    assert ["output", "score", "float32", "[None,", "1]"] in cells
    row = ["table", "embedding/item", "float32", "5", "x", "4,", "80", "bytes"]
    assert row in cells
    assert ["other", "weights", "56", "bytes"] in cells
    text = report.to_json(tmp_path / "report.json")
    assert json.loads(text) == report.to_dict()
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(
        text
    )
    assert report.to_dict()["outputs"][0]["shape"] == [None, 1]


def test_plot_needs_matplotlib(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = every_kind()
    report = tde.export_for_serving(model, tmp_path / "1")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report.plot()


def test_plot_draws_a_bar_a_table(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for matplotlib that notes what is drawn."""
    drawn: dict[str, Any] = {}

    class Figure:
        def __init__(self, **settings: Any) -> None:
            pass

        def add_subplot(self) -> Any:
            return types.SimpleNamespace(
                barh=lambda names, sizes: drawn.update(
                    zip(names, sizes, strict=True)
                ),
                bar_label=lambda bars, labels, padding: drawn.update(
                    labels=labels
                ),
                margins=lambda x: None,
                invert_yaxis=lambda: None,
                set_xlabel=lambda text: None,
                set_title=lambda text: None,
            )

        def savefig(self, path: Any) -> None:
            pathlib.Path(path).write_text("drawn")

    module = types.ModuleType("matplotlib.figure")
    module.Figure = Figure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("m"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    model, _ = every_kind()
    report = tde.export_for_serving(model, tmp_path / "1")
    assert isinstance(report.plot(tmp_path / "sizes.png"), Figure)
    assert (tmp_path / "sizes.png").read_text() == "drawn"
    assert drawn["embedding/item"] == 80 / 2**20
    assert drawn["other weights"] == 56 / 2**20
    assert "80 bytes" in drawn["labels"]


# -- What is refused ----------------------------------


def test_only_models_and_layers(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TypeError, match="takes a Keras model or layer"):
        tde.export_for_serving("model", tmp_path / "1")


@pytest.mark.parametrize("row_dtype", ["int8", "float64", None])
def test_other_row_dtypes_raise(row_dtype: Any, tmp_path: Any) -> None:
    model, _ = every_kind()
    with pytest.raises(ValueError, match="row_dtype must be one of"):
        tde.export_for_serving(model, tmp_path / "1", row_dtype=row_dtype)


def test_places_on_other_machines_raise() -> None:
    model, _ = every_kind()
    with pytest.raises(ValueError, match="this machine.*gs://bucket/1"):
        tde.export_for_serving(model, "gs://bucket/1")


def test_a_model_that_is_not_built_raises(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="not built.*Call it on a batch"):
        tde.export_for_serving(Nested(), tmp_path / "1")


def test_a_signature_without_inputs_raises(tmp_path: pathlib.Path) -> None:
    model, _ = every_kind()
    with pytest.raises(
        ValueError, match="'functional.*' has no inputs to serve"
    ):
        tde.export_for_serving(model, tmp_path / "1", signature={})


def test_a_model_that_does_not_know_its_inputs_raises(
    tmp_path: pathlib.Path,
) -> None:
    model = Nested()
    model({"user": {"id": DENSE}, "seen": Pair(WIDE, WIDE), "tags": [WIDE]})
    with pytest.raises(ValueError, match="does not say what inputs.*signature"):
        tde.export_for_serving(model, tmp_path / "1")
    layer = tde.DistributedEmbedding(feature("f", table("t")))
    with pytest.raises(ValueError, match="does not say what inputs.*signature"):
        tde.export_for_serving(layer, tmp_path / "1")


@pytest.mark.parametrize(
    "leaf, error, message",
    [
        (tf.int64, TypeError, "input 'inputs' must be a tf.TensorSpec"),
        (tf.TensorSpec(None, tf.int64), ValueError, "unknown rank"),
        (
            tf.RaggedTensorSpec([None, None, None], tf.int64),
            ValueError,
            "ragged in dimension 1 only.*ragged_rank=2",
        ),
    ],
)
def test_leaves_of_a_signature_that_raise(
    leaf: Any, error: Any, message: str, tmp_path: pathlib.Path
) -> None:
    layer = tde.DistributedEmbedding(feature("f", table("t")))
    with pytest.raises(error, match=message):
        tde.export_for_serving(layer, tmp_path / "1", signature=leaf)


def test_a_function_that_was_traced_before_cannot_be_narrowed(
    tmp_path: pathlib.Path,
) -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = tde.DistributedEmbedding(feature("f", table("item")))

        @tf.function(
            input_signature=[tf.TensorSpec([None, 2], tf.int64)],
            autograph=False,
        )
        def look_up(self, ids: Any) -> Any:
            return self.layer(ids)

        def call(self, ids: Any) -> Any:
            return {"x": self.look_up(ids)}

    model = Model()
    model(WIDE)
    signature = {"ids": tf.TensorSpec([None, 2], tf.int64)}["ids"]
    with pytest.raises(ValueError, match="Table 'item'.*traced before"):
        tde.export_for_serving(
            model, tmp_path / "1", signature=signature, row_dtype="float16"
        )
    tde.export_for_serving(model, tmp_path / "1", signature=signature)
    outputs = load(tmp_path / "1")(inputs=WIDE)
    np.testing.assert_array_equal(outputs["x"], model(WIDE)["x"])


# -- Without Keras and this package ----------------------------------


_WITHOUT = """
    import importlib.abc, importlib.machinery, sys

    class Refuse(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        # TensorFlow looks where Keras is, without importing it.
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("keras", "tf_distembed"):
                return importlib.machinery.ModuleSpec(name, self, origin="x")

        def exec_module(self, module):
            raise ImportError(f"{module.__name__} must not be needed")

    sys.meta_path.insert(0, Refuse())
    import numpy as np
    import tensorflow as tf

    directory, batch, expected = sys.argv[1:]
    served = tf.saved_model.load(directory).signatures["serving_default"]
    given = {k: tf.constant(v) for k, v in np.load(batch).items()}
    outputs = served(**given)
    for name, value in np.load(expected).items():
        np.testing.assert_array_equal(outputs[name], value)
    given["next"] += 1_000
    try:
        served(**given)
    except tf.errors.InvalidArgumentError as error:
        assert "next" in str(error) and "vocabulary_size=5" in str(error)
    else:
        raise AssertionError("an id outside its table was served")
    assert not {"keras", "tf_distembed"} & set(sys.modules)
    print("served")
"""


def test_a_process_that_has_only_tensorflow(tmp_path: pathlib.Path) -> None:
    model, batch = every_kind()
    trained(model, batch)
    tde.export_for_serving(model, tmp_path / "1")
    np.savez(
        tmp_path / "batch.npz",
        **{k: np.asarray(v) for k, v in flat_batch(batch).items()},
    )
    expected = {k: v.numpy() for k, v in model(batch).items()}
    np.savez(tmp_path / "expected.npz", **expected)
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(_WITHOUT),
            str(tmp_path / "1"),
            str(tmp_path / "batch.npz"),
            str(tmp_path / "expected.npz"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "served"
