"""The layer as Keras knows it: models, training, copies, configurations."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde

KEY = "preprocessed_inputs_per_placement"


def make_layer(**arguments: Any) -> tde.DistributedEmbedding:
    """Two features on one table, a third on another."""
    movie = tde.TableConfig("movie", 12, 4, optimizer="adagrad")
    user = tde.TableConfig("user", 6, 3, optimizer=keras.optimizers.Adam(0.05))
    return tde.DistributedEmbedding(
        {
            "user": tde.FeatureConfig("user", user),
            "next": tde.FeatureConfig("next", movie),
            "seen": tde.FeatureConfig("seen", movie),
        },
        **{"name": "embedding", **arguments},
    )


@keras.saving.register_keras_serializable("test_layer")
class Ratings(keras.Model):
    """A subclassed model; its layer is made with it."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.embedding = make_layer()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        found = self.embedding(inputs, training=training)
        joined = tf.concat([found[k] for k in ("user", "next", "seen")], -1)
        return self.dense(joined)


def functional(ragged: bool = False) -> keras.Model:
    inputs = {
        "user": keras.Input((), dtype="int64", name="user"),
        "next": keras.Input((), dtype="int64", name="next"),
        "seen": keras.Input(
            (None if ragged else 2,), dtype="int64", ragged=ragged, name="seen"
        ),
    }
    found = make_layer()(inputs)
    joined = keras.layers.Concatenate()(
        [found[k] for k in ("user", "next", "seen")]
    )
    return keras.Model(inputs, keras.layers.Dense(1)(joined))


def compiled(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return model


def data(ragged: bool = False) -> tuple[dict[str, Any], np.ndarray]:
    """Five examples, so that a batch of two leaves a last one of one."""
    inputs: dict[str, Any] = {
        "user": np.array([0, 1, 2, 3, 5]),
        "next": np.array([1, 1, 2, 9, 11], np.int32),
        "seen": np.array([[1, 2], [3, 3], [4, 5], [6, 7], [8, 11]]),
    }
    if ragged:
        # Models of Keras take no mixture of arrays and tensors.
        inputs = {name: tf.constant(ids) for name, ids in inputs.items()}
        seen = [[1, 2, 5], [], [4], [6, 7], []]
        inputs["seen"] = tf.ragged.constant(seen, tf.int64)
    return inputs, np.array([[1.0], [2.0], [3.0], [4.0], [5.0]])


def dataset(ragged: bool = False) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data(ragged)).batch(2)


def tables_of(model: keras.Model) -> dict[str, np.ndarray]:
    layer = (
        model.embedding
        if isinstance(model, Ratings)
        else model.get_layer("embedding")
    )
    return {k: v.numpy() for k, v in layer.get_embedding_tables().items()}


def assert_equal(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for key in expected:
        np.testing.assert_array_equal(found[key], expected[key])


@pytest.fixture(scope="module")
def trained() -> keras.Model:
    model = compiled(functional())
    model.fit(dataset(), shuffle=False, verbose=0)
    return model


# -- What Keras sees ----------------------------


def test_a_sub_layer_and_a_variable_a_table_in_order_of_configuration():
    layer = make_layer()
    assert [sub.name for sub in layer._layers if sub.weights] == [
        "user",
        "movie",
    ]
    assert [variable.shape for variable in layer.weights] == [(6, 3), (12, 4)]
    assert [variable.path.split("/")[-2:] for variable in layer.weights] == [
        ["user", "embeddings"],
        ["movie", "embeddings"],
    ]
    assert [id(v) for v in layer.trainable_variables] == [
        id(v) for v in layer.weights
    ]
    assert layer.non_trainable_variables == []
    assert layer.count_params() == 6 * 3 + 12 * 4


def test_keras_takes_no_slots_of_a_table_for_weights_of_the_model(trained):
    assert len(trained.weights) == 4
    shapes = {tuple(v.shape) for v in trained.optimizer.variables}
    assert (12, 4) not in shapes
    assert (6, 3) not in shapes


def test_summary_counts_every_table():
    lines: list[str] = []
    model = functional()
    model.summary(print_fn=lambda line, **_: lines.append(line))
    text = "\n".join(lines)
    assert "embedding" in text
    assert f"Total params: {66 + 12}" in text
    assert f"Trainable params: {66 + 12}" in text


def test_it_is_built_when_made_and_building_again_changes_nothing():
    layer = make_layer()
    assert layer.built
    before = {k: v.numpy() for k, v in layer.get_embedding_tables().items()}
    variables = [id(v) for v in layer.weights]
    layer.build(None)
    layer.build({"user": (None,), "next": (None,), "seen": (None, 2)})
    assert [id(v) for v in layer.weights] == variables
    for name, value in layer.get_embedding_tables().items():
        np.testing.assert_array_equal(value, before[name])


def test_set_weights_and_get_weights():
    layer = make_layer()
    values = [np.ones([6, 3], "float32"), np.full([12, 4], 2.0, "float32")]
    layer.set_weights(values)
    for found, value in zip(layer.get_weights(), values, strict=True):
        np.testing.assert_array_equal(found, value)
    np.testing.assert_array_equal(layer.get_embedding_tables()["user"], 1.0)


def test_it_compiles_only_once_all_kinds_are_known_to_be_dense():
    layer = make_layer()
    assert not layer.supports_jit
    dense = {"user": [1], "next": [2], "seen": [[3, 3]]}
    layer(dense)
    assert layer.supports_jit
    layer({**dense, "seen": [[1], [2, 3]][:1]})
    assert layer.supports_jit
    layer({**dense, "user": [1, 2], "next": [2, 2], "seen": [[1], [2, 3]]})
    assert not layer.supports_jit
    layer(dense)
    assert not layer.supports_jit


# -- Models -------------------------------------


@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
@pytest.mark.parametrize("make", [functional, Ratings])
def test_fit_evaluate_and_predict(make, ragged):
    model = compiled(make(ragged) if make is functional else make())
    before = tables_of(model) if make is functional else None
    history = model.fit(
        dataset(ragged), epochs=3, shuffle=False, verbose=0
    ).history["loss"]
    assert history[-1] < history[0]
    inputs, labels = data(ragged)
    predicted = model.predict(dataset(ragged), verbose=0)
    assert predicted.shape == (5, 1)
    np.testing.assert_allclose(predicted, model(inputs), atol=1e-6)
    loss = model.evaluate(dataset(ragged), verbose=0)
    np.testing.assert_allclose(
        loss, np.mean((predicted - labels) ** 2), rtol=1e-5
    )
    if before is not None:
        # Rows of ids that were fed have moved, the others have not.
        after = tables_of(model)
        fed = {1, 2, 9, 11, 3, 4, 5, 6, 7, 8} - ({3, 8} if ragged else set())
        changed = (after["movie"] != before["movie"]).any(-1)
        assert set(np.flatnonzero(changed)) == fed
        assert not (after["user"] == before["user"])[[0, 1, 2, 3, 5]].any()
        np.testing.assert_array_equal(after["user"][4], before["user"][4])


def test_fit_with_arrays_and_with_tensors():
    inputs, labels = data()
    tensors = {name: tf.constant(value) for name, value in inputs.items()}
    initial = functional().get_weights()
    trained = []
    for fed in (inputs, tensors):
        model = compiled(functional())
        model.set_weights(initial)
        model.fit(fed, labels, batch_size=2, shuffle=False, verbose=0)
        np.testing.assert_allclose(
            model.predict(fed, batch_size=2, verbose=0),
            model(fed),
            atol=1e-6,
        )
        assert model.evaluate(fed, labels, batch_size=2, verbose=0) > 0
        trained.append(tables_of(model))
    assert_equal(trained[0], trained[1])


def test_train_on_batch_is_a_step_of_fit():
    inputs, labels = data()
    one, other = compiled(functional()), compiled(functional())
    other.set_weights(one.get_weights())
    one.fit(inputs, labels, batch_size=5, verbose=0)
    other.train_on_batch(inputs, labels)
    assert_equal(tables_of(other), tables_of(one))
    state = other.get_layer("embedding").get_optimizer_state()
    assert state["movie"]["step"] == state["user"]["step"] == 1


def test_a_bare_feature_in_a_sequential_model():
    table = tde.TableConfig("movie", 12, 4, optimizer="sgd")
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            tde.DistributedEmbedding(tde.FeatureConfig("movie", table)),
            keras.layers.Dense(1),
        ]
    )
    compiled(model).fit(np.array([[1, 2, 3]] * 4), np.ones([4, 1]), verbose=0)
    assert model.output_shape == (None, 1)
    assert model.layers[0].output.shape == (None, 4)


# -- Keras tensors ------------------------------


@pytest.mark.parametrize(
    "kind",
    [{}, {"ragged": True}, {"sparse": True}],
    ids=["dense", "ragged", "sparse"],
)
def test_symbolic_outputs_carry_the_batch_of_the_inputs(kind):
    table = tde.TableConfig("movie", 12, 4)
    layer = tde.DistributedEmbedding(
        [
            tde.FeatureConfig("a", table, (64, 3), (64, 4)),
            tde.FeatureConfig("b", table, (64, 3), (64, 3, 4)),
        ]
    )
    for batch in (None, 7):
        one = keras.Input(shape=(3,), batch_size=batch, dtype="int64", **kind)
        a, b = layer([one, one])
        assert a.shape == (batch, 4)
        assert b.shape == (batch, 3, 4)
        assert (a.dtype, a.sparse) == ("float32", False)
    shapes = layer.compute_output_shape([(7, 3), (None, 3)])
    assert shapes == [(7, 4), (None, 3, 4)]


def test_symbolic_weights():
    table = tde.TableConfig("movie", 12, 4, combiner="sum")
    layer = tde.DistributedEmbedding({"a": tde.FeatureConfig("a", table)})
    ids = keras.Input((2,), dtype="int64", name="ids")
    weights = keras.Input((2,), name="weights")
    model = keras.Model([ids, weights], layer({"a": ids}, {"a": weights})["a"])
    rows = layer.get_embedding_tables()["movie"].numpy()
    output = model([np.array([[1, 2]]), np.array([[2.0, 3.0]])])
    np.testing.assert_allclose(output, [2 * rows[1] + 3 * rows[2]], rtol=1e-5)
    with pytest.raises(ValueError, match="Feature 'a': weights must have the"):
        layer({"a": ids}, {"a": keras.Input((3,))})


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_functional_models_of_ragged_and_sparse_inputs(kind):
    table = tde.TableConfig("movie", 12, 4)
    layer = tde.DistributedEmbedding(tde.FeatureConfig("a", table))
    ids = keras.Input((None,), dtype="int64", **{kind: True})
    model = keras.Model(ids, layer(ids))
    fed = tf.ragged.constant([[1, 2], [], [3]], tf.int64)
    expected = layer(fed)
    if kind == "sparse":
        fed = tf.sparse.from_dense([[0, 1, 2], [0, 0, 0], [3, 0, 0]])
        fed = tf.sparse.map_values(lambda x: tf.cast(x, tf.int64), fed)
    np.testing.assert_array_equal(model(fed), expected)
    assert not layer.supports_jit


# -- Where a layer is made ----------------------


class MadeInBuild(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        table = tde.TableConfig("movie", 12, 4, optimizer=self.optimizer)
        self.embedding = tde.DistributedEmbedding(
            tde.FeatureConfig("movie", table)
        )

    def call(self, inputs: Any) -> Any:
        return self.embedding(inputs)


@pytest.mark.parametrize("optimizer", ["adam", None])
def test_a_layer_made_in_a_build(optimizer):
    layer = MadeInBuild()
    layer.optimizer = optimizer
    assert layer(keras.Input((3,), dtype="int64")).shape == (None, 4)
    assert layer(np.array([[1, 2, 3]])).shape == (1, 4)


@pytest.mark.filterwarnings("ignore:.*unbuilt state")
@pytest.mark.parametrize("optimizer", ["adam", None])
def test_a_layer_made_where_keras_only_infers_shapes_is_refused(optimizer):
    class Outer(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MadeInBuild()
            self.inner.optimizer = optimizer

        def call(self, inputs: Any) -> Any:
            return self.inner(inputs)

    with pytest.raises(ValueError) as caught:
        Outer()(keras.Input((3,), dtype="int64"))
    text = str(caught.value)
    assert "cannot make its tables here" in text
    assert "Make the layer in the __init__ of the model or layer" in text
    assert "stateless" not in text


def test_a_model_that_makes_its_layer_in_build_trains():
    class Lazy(keras.Model):
        def build(self, shape: Any) -> None:
            table = tde.TableConfig("movie", 12, 4)
            self.embedding = tde.DistributedEmbedding(
                tde.FeatureConfig("movie", table)
            )
            self.dense = keras.layers.Dense(1)
            self.dense.build((None, 4))

        def call(self, inputs: Any) -> Any:
            return self.dense(self.embedding(inputs))

    model = compiled(Lazy())
    ids, labels = np.array([[1, 2], [3, 4]]), np.ones([2, 1])
    history = model.fit(ids, labels, epochs=3, verbose=0).history["loss"]
    assert history[-1] < history[0]
    assert model.embedding.get_optimizer_state()["movie"]["step"] == 3


def test_a_layer_made_and_trained_inside_a_traced_function():
    made: list[Any] = []
    optimizer = keras.optimizers.SGD(0.5)

    @tf.function
    def step(ids: tf.Tensor) -> tf.Tensor:
        if not made:
            table = tde.TableConfig("movie", 12, 4)
            made.append(
                tde.DistributedEmbedding(tde.FeatureConfig("movie", table))
            )
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(made[0](ids, training=True) ** 2)
        variables = made[0].trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    ids = tf.constant([[1, 2]])
    losses = [float(step(ids)) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    assert made[0].get_optimizer_state()["movie"]["step"] == 3


# -- Freezing -----------------------------------


def test_a_frozen_layer_is_not_trained_until_it_is_thawed():
    model = compiled(functional())
    layer = model.get_layer("embedding")
    layer.trainable = False
    assert layer.trainable_variables == []
    compiled(model)
    before = tables_of(model)
    model.fit(dataset(), shuffle=False, verbose=0)
    assert_equal(tables_of(model), before)
    assert layer.get_optimizer_state()["movie"]["step"] == 0
    layer.trainable = True
    compiled(model)
    model.fit(dataset(), shuffle=False, verbose=0)
    assert (tables_of(model)["movie"] != before["movie"]).any()
    assert layer.get_optimizer_state()["movie"]["step"] == 3


def test_a_frozen_table_stays_frozen_when_its_layer_is_frozen_and_thawed():
    frozen = tde.TableConfig("frozen", 12, 4, trainable=False)
    free = tde.TableConfig("free", 12, 4)
    layer = tde.DistributedEmbedding(
        [tde.FeatureConfig("a", frozen), tde.FeatureConfig("b", free)]
    )
    assert [v.path.split("/")[-2] for v in layer.weights] == ["frozen", "free"]
    layer.trainable = False
    layer.trainable = True
    assert [v.path.split("/")[-2] for v in layer.trainable_variables] == [
        "free"
    ]
    assert list(layer.table_optimizers) == ["free"]
    before = {k: v.numpy() for k, v in layer.get_embedding_tables().items()}
    ids = [np.array([[1], [2]])] * 2
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(x**2) for x in layer(ids)])
    variables = layer.trainable_variables
    keras.optimizers.SGD().apply(tape.gradient(loss, variables), variables)
    after = layer.get_embedding_tables()
    np.testing.assert_array_equal(after["frozen"], before["frozen"])
    assert (after["free"].numpy() != before["free"]).any()


# -- Copies and configurations ------------------


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_a_copy_of_a_layer_has_its_state_and_is_independent(duplicate, trained):
    layer = trained.get_layer("embedding")
    again = duplicate(layer)
    assert_equal(again.get_embedding_tables(), layer.get_embedding_tables())
    state, expected = again.get_optimizer_state(), layer.get_optimizer_state()
    for table in expected:
        assert_equal(state[table], expected[table])
    before = layer.get_embedding_tables()["user"].numpy()
    again.set_embedding_tables({"user": np.zeros([6, 3])})
    outputs = again({"user": [1], "next": [1], "seen": [[1]]})
    np.testing.assert_array_equal(outputs["user"], np.zeros([1, 3]))
    np.testing.assert_array_equal(layer.get_embedding_tables()["user"], before)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_a_copy_of_a_model_trains_on_as_the_model_does(duplicate, trained):
    again = duplicate(trained)
    original = duplicate(trained)
    for model in (again, original):
        model.fit(dataset(), shuffle=False, verbose=0)
    assert_equal(tables_of(again), tables_of(original))
    state = again.get_layer("embedding").get_optimizer_state()
    assert state["movie"]["step"] == 6
    assert (
        trained.get_layer("embedding").get_optimizer_state()["movie"]["step"]
        == 3
    )


def test_clone_model_makes_new_tables(trained):
    clone = keras.models.clone_model(trained)
    inputs, _ = data()
    assert clone(inputs).shape == (5, 1)
    layer = clone.get_layer("embedding")
    assert layer.get_optimizer_state()["movie"]["step"] == 0
    assert (tables_of(clone)["movie"] != tables_of(trained)["movie"]).any()
    ours = trained.get_layer("embedding").table_optimizers
    assert all(layer.table_optimizers[k] is not ours[k] for k in ours)


native = tf.tpu.experimental.embedding


def many_settings() -> tde.DistributedEmbedding:
    """Shared tables, shared optimizers, arrays, schedules."""
    shared = keras.optimizers.Adagrad(
        keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    )
    tables = [
        tde.TableConfig(
            "array",
            5,
            2,
            initializer=np.arange(10.0).reshape(5, 2),
            optimizer=shared,
        ),
        tde.TableConfig("shared", 5, 2, "zeros", shared, "sum"),
        tde.TableConfig("name", 5, 2, "ones", "adam"),
        tde.TableConfig("name_too", 5, 2, optimizer="adam"),
        tde.TableConfig(
            "dict",
            5,
            2,
            optimizer={"class_name": "sgd", "config": {"momentum": 0.5}},
        ),
        tde.TableConfig("native", 5, 3, optimizer=native.FTRL(0.3, beta=0.1)),
        tde.TableConfig("default", 5, 3, optimizer=None),
        tde.TableConfig("frozen", 5, 3, trainable=False),
    ]
    features = [tde.FeatureConfig(f"f_{t.name}", t) for t in tables]
    more = tde.FeatureConfig("more", tables[0], (None, 3), (None, 3, 2))
    return tde.DistributedEmbedding(
        {"z": features, "a": (more,)},
        table_stacking=[["array", "shared"], ["name", "name_too"]],
        invalid_ids={"more": "drop"},
        optimizer=keras.optimizers.SGD(0.125),
        name="many",
        dtype="float64",
    )


def ids_for_many() -> Any:
    return {"z": [[1, 2]] * 8, "a": ([[1, 2, 9], [3, 3, 3]],)}


def test_a_config_goes_through_json_and_back():
    layer = many_settings()
    layer.table_optimizers["name"].learning_rate = 0.75
    layer.table_optimizers["name_too"].learning_rate = 0.75
    layer.table_optimizers["native"].learning_rate = 0.25
    written = keras.saving.serialize_keras_object(layer)
    read = json.loads(json.dumps(written))
    again = keras.saving.deserialize_keras_object(read)
    assert again.name == "many"
    assert again.variable_dtype == "float64"
    assert again.get_config() == layer.get_config()
    optimizers = again.table_optimizers
    assert list(optimizers) == list(layer.table_optimizers)
    assert optimizers["array"] is optimizers["shared"]
    assert optimizers["name"] is not optimizers["name_too"]
    assert float(optimizers["name"].learning_rate) == 0.75
    assert float(optimizers["native"].learning_rate) == 0.25
    assert float(optimizers["default"].learning_rate) == 0.125
    assert float(optimizers["dict"].momentum) == 0.5
    # The tables of z[0] and a[0] are one.
    outputs = again(ids_for_many())
    np.testing.assert_array_equal(outputs["z"][0], [[2, 3], [4, 5]])
    np.testing.assert_array_equal(
        outputs["a"][0], [[[2, 3], [4, 5], [0, 0]], [[6, 7]] * 3]
    )
    assert again.id_statistics()["dropped"]["more"] == 1
    assert len(again.weights) == 8
    again.set_embedding_tables({"array": np.ones([5, 2])})
    outputs = again(ids_for_many())
    np.testing.assert_array_equal(outputs["z"][0], np.ones([2, 2]))
    np.testing.assert_array_equal(outputs["a"][0][1], np.ones([3, 2]))


def test_from_config_leaves_its_dict_as_it_is():
    config = many_settings().get_config()
    before = copy.deepcopy(config)
    one = tde.DistributedEmbedding.from_config(config)
    assert config == before
    other = tde.DistributedEmbedding.from_config(config)
    assert config == before
    assert one.get_config() == other.get_config() == config
    assert one.table_optimizers["array"] is not other.table_optimizers["array"]


def test_layer_arguments_reach_keras():
    layer = make_layer(name="n", dtype="mixed_bfloat16", trainable=False)
    assert layer.name == "n"
    assert layer.trainable is False
    outputs = layer({"user": [1], "next": [1], "seen": [[1]]})
    assert outputs["user"].dtype == tf.bfloat16
    assert layer.weights[0].dtype == "float32"
    assert layer.get_config()["trainable"] is False
    with pytest.raises((TypeError, ValueError), match="nonsense"):
        make_layer(nonsense=1)


# -- preprocess ---------------------------------


def same_outputs(layer: Any, found: Any, inputs: Any, *weights: Any) -> None:
    assert_equal(layer(found), layer(inputs, *weights))


INPUTS = {
    "user": np.array([1, 2]),
    "next": tf.constant([3, 4]),
    "seen": [[5, 5, 6], [7]],
}


def test_preprocess_gives_tensors_alone_in_flat_order():
    layer = make_layer()
    found = layer.preprocess(INPUTS)
    assert list(found) == [KEY]
    assert list(found[KEY]) == ["default_device"]
    part = found[KEY]["default_device"]
    assert list(part) == ["inputs"]
    user, following, seen = part["inputs"]
    assert isinstance(user, tf.Tensor)
    assert isinstance(following, tf.Tensor)
    assert isinstance(seen, tf.RaggedTensor)
    same_outputs(layer, found, INPUTS)


def test_preprocess_fills_in_missing_weights():
    layer = make_layer()
    weights = {"user": None, "next": None, "seen": [[1.0, 2.0, 0.5], [3.0]]}
    found = layer.preprocess(INPUTS, weights)
    user, following, seen = found[KEY]["default_device"]["weights"]
    np.testing.assert_array_equal(user, [1.0, 1.0])
    np.testing.assert_array_equal(following, [1.0, 1.0])
    np.testing.assert_array_equal(seen.values, [1.0, 2.0, 0.5, 3.0])
    same_outputs(layer, found, INPUTS, weights)
    without = layer.preprocess(INPUTS, dict.fromkeys(INPUTS))
    assert list(without[KEY]["default_device"]) == ["inputs"]
    for kind in (
        tf.ragged.constant([[1], [2]]),
        tf.sparse.eye(2, dtype="int64"),
    ):
        inputs = {**INPUTS, "seen": kind}
        part = {"user": [2.0, 3.0], "next": None, "seen": None}
        same_outputs(layer, layer.preprocess(inputs, part), inputs, part)


def test_preprocess_in_dataset_map_and_through_fit():
    model = compiled(Ratings())
    direct = compiled(Ratings())
    layer = model.embedding
    prepared = dataset(True).map(lambda x, y: (layer.preprocess(x), y))
    spec = prepared.element_spec[0][KEY]["default_device"]["inputs"]
    assert isinstance(spec, tuple)
    assert isinstance(spec[2], tf.RaggedTensorSpec)
    model(next(iter(prepared))[0])
    direct(next(iter(dataset(True)))[0])
    direct.set_weights(model.get_weights())
    model.fit(prepared, shuffle=False, verbose=0)
    direct.fit(dataset(True), shuffle=False, verbose=0)
    assert_equal(tables_of(model), tables_of(direct))
    assert model.predict(prepared, verbose=0).shape == (5, 1)
    assert model.evaluate(prepared, verbose=0) > 0


def test_preprocess_in_dataset_map_with_weights():
    layer = make_layer()
    weights = {"user": None, "next": None, "seen": [[2.0, 1.0]]}
    batches = tf.data.Dataset.from_tensors(
        {"user": [1], "next": [2], "seen": [[3, 4]]}
    )
    found = next(iter(batches.map(lambda x: layer.preprocess(x, weights))))
    same_outputs(layer, found, next(iter(batches)), weights)


def test_preprocess_in_a_traced_function():
    layer = make_layer()
    inputs = {**INPUTS, "seen": tf.ragged.constant(INPUTS["seen"], tf.int64)}
    found = tf.function(layer.preprocess)(inputs)
    same_outputs(layer, found, inputs)
    outputs = tf.function(lambda x: layer(layer.preprocess(x)))(inputs)
    assert_equal(outputs, layer(inputs))


def symbolic_inputs() -> dict[str, Any]:
    return {
        "user": keras.Input((), dtype="int64", name="user"),
        "next": keras.Input((), dtype="int64", name="next"),
        "seen": keras.Input((2,), dtype="int64", name="seen"),
    }


def test_preprocess_of_keras_tensors():
    layer = make_layer()
    inputs = symbolic_inputs()
    model = keras.Model(inputs, layer(layer.preprocess(inputs)))
    fed, _ = data()
    assert_equal(model(fed), layer(fed))


def test_preprocess_of_keras_tensors_with_weights_for_some():
    layer = make_layer()
    inputs = symbolic_inputs()
    weights = keras.Input((2,), name="weights")
    found = layer.preprocess(
        inputs, {"user": None, "next": None, "seen": weights}
    )
    model = keras.Model({**inputs, "weights": weights}, layer(found))
    fed, _ = data()
    given = np.arange(10.0, dtype="float32").reshape(5, 2)
    expected = layer(fed, {"user": None, "next": None, "seen": given})
    found = model({**fed, "weights": given})
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)
    sparse = {**inputs, "seen": keras.Input((2,), dtype="int64", sparse=True)}
    part = {"user": keras.Input(()), "next": None, "seen": None}
    with pytest.raises(ValueError) as caught:
        layer.preprocess(sparse, part)
    assert "Feature 'seen': preprocess needs weights" in str(caught.value)
    assert "Pass weights of 1" in str(caught.value)


def test_preprocessed_inputs_as_the_inputs_of_a_model():
    layer = make_layer()
    symbolic = layer.preprocess(symbolic_inputs())
    inputs = keras.tree.map_structure(
        lambda x: keras.Input(x.shape[1:], dtype=x.dtype), symbolic
    )
    model = keras.Model(inputs, layer(inputs))
    fed, _ = data()
    assert_equal(model(layer.preprocess(fed)), layer(fed))


def test_preprocess_refuses_what_the_layer_refuses():
    layer = make_layer()
    wrong = [
        ({**INPUTS, "user": [1.0, 2.0]}, TypeError, "Feature 'user': ids must"),
        ({"user": [1]}, ValueError, "Missing: ['next', 'seen']"),
        ({**INPUTS, "next": np.zeros([2, 2, 2], int)}, ValueError, "rank 1 or"),
    ]
    for inputs, error, text in wrong:
        with pytest.raises(error) as caught:
            layer.preprocess(inputs)
        assert text in str(caught.value)


def test_weights_beside_preprocessed_inputs_are_refused():
    layer = make_layer()
    found = layer.preprocess(INPUTS)
    with pytest.raises(ValueError, match="pass weights to preprocess"):
        layer(found, {"user": None, "next": None, "seen": None})
    with pytest.raises(ValueError, match="already preprocessed"):
        layer.preprocess(found)


def broken(change: Callable[[dict], Any]) -> Any:
    found = make_layer().preprocess(
        {"user": [1], "next": [2], "seen": [[1, 2]]}
    )
    part = dict(found[KEY]["default_device"])
    return {KEY: change(part)}


@pytest.mark.parametrize(
    "change, parts",
    [
        (lambda part: {}, ["['default_device']", "Received: []"]),
        (
            lambda part: {"default_device": part, "gpu": part},
            ["['default_device']", "'gpu'"],
        ),
        (lambda part: (part,), [f"'{KEY}'", "['default_device']"]),
        (
            lambda part: {"default_device": {"weights": part["inputs"]}},
            ["'default_device'", "['inputs']", "['weights']"],
        ),
        (
            lambda part: {"default_device": {**part, "more": part["inputs"]}},
            ["'default_device'", "['inputs']", "'more'"],
        ),
        (
            lambda part: {"default_device": {"inputs": part["inputs"][:2]}},
            ["inputs of placement 'default_device'", "tuple of 3", "'seen'"],
        ),
        (
            lambda part: {"default_device": {"inputs": part["inputs"][0]}},
            ["tuple of 3", "['user', 'next', 'seen']"],
        ),
    ],
)
def test_preprocessed_inputs_of_another_form_are_refused(change, parts):
    with pytest.raises(ValueError) as caught:
        make_layer()(broken(change))
    for part in parts:
        assert part in str(caught.value), caught.value
