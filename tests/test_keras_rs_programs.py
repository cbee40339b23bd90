"""Programs for Keras-RS' embedding layers run here by a change of one import.

Each is what the documentation of those layers shows one how to do on
TensorFlow: configure, train with `fit` or a loop, call directly, weigh,
preprocess, save and load. `api` is the module that the names come from; every
program runs with Keras-RS too, so that it is known to be one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import keras_rs
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde

BATCH = 8
USERS, MOVIES, DIM = 20, 30, 8

APIS = {"tf_distembed": tde, "keras_rs": keras_rs.layers}


@pytest.fixture(params=APIS.values(), ids=APIS)
def api(request: pytest.FixtureRequest) -> Any:
    return request.param


def tables(api: Any, **settings: Any) -> tuple[Any, Any]:
    user = api.TableConfig(
        name="user_table",
        vocabulary_size=USERS,
        embedding_dim=DIM,
        combiner="mean",
        **{
            "initializer": "uniform",
            "optimizer": "adam",
            "placement": "auto",
            **settings,
        },
    )
    movie = api.TableConfig(
        name="movie_table",
        vocabulary_size=MOVIES,
        embedding_dim=DIM,
        **{"optimizer": "adagrad", **settings},
    )
    return user, movie


def feature_configs(api: Any, **settings: Any) -> dict[str, Any]:
    """One user and one movie an example."""
    user, movie = tables(api, **settings)
    return {
        "user_id": api.FeatureConfig(
            name="user",
            table=user,
            input_shape=(BATCH,),
            output_shape=(BATCH, DIM),
        ),
        "movie_id": api.FeatureConfig(
            name="movie",
            table=movie,
            input_shape=(BATCH,),
            output_shape=(BATCH, DIM),
        ),
    }


def nested_configs(api: Any) -> dict[str, Any]:
    """Lists of movies beside one movie, of one table, and tags."""
    user, movie = tables(api)
    shapes = {"input_shape": (BATCH, None), "output_shape": (BATCH, DIM)}
    return {
        "query": {
            "user": api.FeatureConfig(
                name="user",
                table=user,
                input_shape=(BATCH,),
                output_shape=(BATCH, DIM),
            ),
            "watched": api.FeatureConfig(name="watched", table=movie, **shapes),
        },
        "candidates": [
            api.FeatureConfig(name="liked", table=movie, **shapes),
            api.FeatureConfig(name="skipped", table=movie, **shapes),
        ],
    }


def nested_inputs() -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(5)
    lengths = [3, 1, 2, 4, 1, 2, 5, 2]
    ids = rng.permutation(MOVIES)[: sum(lengths)].astype(np.int64)
    weights = rng.uniform(0.5, 2.0, sum(lengths)).astype(np.float32)
    ragged = tf.RaggedTensor.from_row_lengths
    dense = rng.integers(0, MOVIES, (BATCH, 3))
    inputs = {
        "query": {
            "user": tf.constant(rng.integers(0, USERS, BATCH)),
            "watched": ragged(ids, lengths),
        },
        "candidates": [
            tf.constant(dense),
            ragged(ids, lengths).to_sparse(),
        ],
    }
    given = {
        "query": {
            "user": tf.ones([BATCH]),
            "watched": ragged(weights, lengths),
        },
        "candidates": [
            tf.constant(rng.uniform(size=dense.shape).astype(np.float32)),
            ragged(weights, lengths).to_sparse(),
        ],
    }
    return inputs, given


def ratings() -> tf.data.Dataset:
    """64 ratings, linear in what the ids stand for."""
    rng = np.random.default_rng(7)
    user, movie = rng.integers(0, USERS, 64), rng.integers(0, MOVIES, 64)
    rating = (user / USERS + movie / MOVIES) / 2
    return tf.data.Dataset.from_tensor_slices(
        (
            {
                "user_id": user.astype(np.int32),
                "movie_id": movie.astype(np.int32),
            },
            rating.astype(np.float32)[:, None],
        )
    ).batch(BATCH, drop_remainder=True)


class RankingModel(keras.Model):
    """Looks up, concatenates, and rates."""

    def __init__(self, api: Any, configs: Any, **settings: Any) -> None:
        super().__init__()
        self.embedding_layer = api.DistributedEmbedding(
            feature_configs=configs, **settings
        )
        # Seeded here: the tables of one library may draw more than those of
        # the other.
        first, second = (
            keras.initializers.GlorotUniform(seed) for seed in (1, 2)
        )
        self.rating = keras.Sequential(
            [
                keras.layers.Dense(
                    16, activation="relu", kernel_initializer=first
                ),
                keras.layers.Dense(1, kernel_initializer=second),
            ]
        )

    def call(self, features: Any) -> Any:
        found = self.embedding_layer(features)
        return self.rating(
            keras.ops.concatenate([found["user_id"], found["movie_id"]], axis=1)
        )


def compiled(model: keras.Model) -> keras.Model:
    model.compile(
        loss=keras.losses.MeanSquaredError(),
        metrics=[keras.metrics.RootMeanSquaredError()],
        optimizer=keras.optimizers.Adagrad(0.1),
    )
    return model


def functional_model(api: Any, layer: Any) -> keras.Model:
    inputs = {
        name: keras.Input((), dtype="int32", name=name, batch_size=BATCH)
        for name in ("user_id", "movie_id")
    }
    found = layer(inputs)
    joined = keras.layers.Concatenate()([found["user_id"], found["movie_id"]])
    return keras.Model(inputs, keras.layers.Dense(1)(joined))


def filled(layer: Any) -> Any:
    """The layer with values that do not depend on which layer it is.

    By shape, since Keras-RS orders its weights by the sorted keys of dicts.
    """
    for weight in layer.weights:
        seed = weight.shape[0]
        weight.assign(np.random.default_rng(seed).normal(size=weight.shape))
    return layer


def flat(outputs: Any) -> list[np.ndarray]:
    return [np.asarray(one) for one in keras.tree.flatten(outputs)]


# --- Every program runs with either import


def test_fit_evaluate_and_predict(api):
    model = compiled(RankingModel(api, feature_configs(api)))
    history = model.fit(ratings(), epochs=5, verbose=0).history
    assert history["loss"][-1] < history["loss"][0] / 2
    found = model.evaluate(ratings(), return_dict=True, verbose=0)
    assert found["root_mean_squared_error"] < 0.3
    assert model.predict(ratings(), verbose=0).shape == (64, 1)


def test_a_functional_model(api):
    layer = api.DistributedEmbedding(feature_configs(api))
    model = compiled(functional_model(api, layer))
    history = model.fit(ratings(), epochs=5, verbose=0).history
    assert history["loss"][-1] < history["loss"][0] / 2


def test_a_sequential_model_of_one_feature(api):
    user, _ = tables(api)
    layer = api.DistributedEmbedding(
        api.FeatureConfig("user", user, (BATCH,), (BATCH, DIM))
    )
    model = keras.Sequential(
        [
            keras.Input((), dtype="int32", batch_size=BATCH),
            layer,
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse")
    dataset = ratings().map(lambda x, y: (x["user_id"], y))
    model.fit(dataset, verbose=0)
    assert model.predict(dataset, verbose=0).shape == (64, 1)


def test_a_loop_of_ones_own(api):
    layer = api.DistributedEmbedding(feature_configs(api))
    head = keras.layers.Dense(1)
    optimizer = keras.optimizers.Adam(0.05)

    @tf.function
    def step(inputs, labels):
        with tf.GradientTape() as tape:
            found = layer(inputs)
            rated = head(
                keras.ops.concatenate(
                    [found["user_id"], found["movie_id"]], axis=1
                )
            )
            loss = keras.ops.mean(
                keras.losses.mean_squared_error(labels, rated)
            )
        variables = layer.trainable_variables + head.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    inputs, labels = next(iter(ratings()))
    layer(inputs)
    head.build((BATCH, 2 * DIM))
    optimizer.build(layer.trainable_variables + head.trainable_variables)
    losses = [float(step(inputs, labels)) for _ in range(20)]
    assert losses[-1] < losses[0] / 2


def test_direct_calls_with_weights_in_nested_structures(api):
    layer = api.DistributedEmbedding(nested_configs(api))
    inputs, weights = nested_inputs()
    for outputs in (layer(inputs), layer(inputs, weights)):
        assert list(outputs) == ["query", "candidates"]
        assert [one.shape for one in flat(outputs)] == [(BATCH, DIM)] * 4


def test_preprocess_in_the_input_pipeline(api):
    layer = api.DistributedEmbedding(nested_configs(api))
    inputs, weights = nested_inputs()
    preprocessed = layer.preprocess(inputs, weights, training=True)
    for got, expected in zip(
        flat(layer(preprocessed)), flat(layer(inputs, weights)), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_fit_on_preprocessed_inputs(api):
    model = compiled(RankingModel(api, feature_configs(api)))
    layer = model.embedding_layer
    dataset = ratings().map(lambda x, y: (layer.preprocess(x), y))
    history = model.fit(dataset, epochs=5, verbose=0).history
    assert history["loss"][-1] < history["loss"][0] / 2


def test_save_and_load(api, tmp_path: Path):
    layer = api.DistributedEmbedding(feature_configs(api))
    model = compiled(functional_model(api, layer))
    model.fit(ratings(), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(
        loaded.predict(ratings(), verbose=0),
        model.predict(ratings(), verbose=0),
        rtol=1e-5,
    )
    loaded.fit(ratings(), verbose=0)


def test_save_and_load_weights(api, tmp_path: Path):
    first = compiled(RankingModel(api, feature_configs(api)))
    first.fit(ratings(), verbose=0)
    first.save_weights(tmp_path / "model.weights.h5")
    second = compiled(RankingModel(api, feature_configs(api)))
    second.predict(ratings(), verbose=0)
    second.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_allclose(
        second.predict(ratings(), verbose=0),
        first.predict(ratings(), verbose=0),
        rtol=1e-5,
    )


def test_a_configuration_is_read_back(api):
    layer = api.DistributedEmbedding(nested_configs(api), name="embedding")
    again = api.DistributedEmbedding.from_config(layer.get_config())
    assert again.name == "embedding"
    inputs, _ = nested_inputs()
    layer(inputs), again(inputs)
    assert [v.shape for v in again.weights] == [v.shape for v in layer.weights]
    assert set(again.get_embedding_tables()) == {"user_table", "movie_table"}


def test_tables_are_read_by_name(api):
    layer = api.DistributedEmbedding(nested_configs(api))
    layer(nested_inputs()[0])
    shapes = {
        name: tuple(table.shape)
        for name, table in layer.get_embedding_tables().items()
    }
    assert shapes == {"user_table": (USERS, DIM), "movie_table": (MOVIES, DIM)}


def test_the_shapes_of_the_outputs_are_known(api):
    layer = api.DistributedEmbedding(feature_configs(api))
    assert layer.compute_output_shape(
        {"user_id": (BATCH,), "movie_id": (BATCH,)}
    ) == {"user_id": (BATCH, DIM), "movie_id": (BATCH, DIM)}


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_the_simple_layer(api, combiner):
    layer = api.EmbedReduce(MOVIES, DIM, combiner=combiner)
    dense = tf.constant([[1, 2, 2], [3, 4, 5]])
    ragged = tf.ragged.constant([[1, 2], [3]])
    assert layer(dense).shape == (2, DIM)
    assert layer(ragged).shape == (2, DIM)
    assert layer(dense, tf.ones([2, 3])).shape == (2, DIM)
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), layer, keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    model.fit(dense, tf.zeros([2, 1]), verbose=0)


# --- What both compute is equal


def test_both_have_one_variable_a_table():
    ours, theirs = (
        one.DistributedEmbedding(nested_configs(one)) for one in APIS.values()
    )
    for layer in (ours, theirs):
        layer(nested_inputs()[0])
    # Ours in the order of configuration, theirs in that of sorted keys.
    shapes = [(USERS, DIM), (MOVIES, DIM)]
    assert [tuple(v.shape) for v in ours.weights] == shapes
    assert sorted(tuple(v.shape) for v in theirs.weights) == shapes


@pytest.mark.parametrize("weighted", [False, True])
def test_outputs_are_equal(weighted):
    inputs, weights = nested_inputs()
    found = []
    for one in APIS.values():
        layer = one.DistributedEmbedding(nested_configs(one))
        layer(inputs)
        filled(layer)
        found.append(flat(layer(inputs, weights if weighted else None)))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_training_is_equal_where_keras_rs_is_right():
    """SGD, with the rate that Keras-RS takes from the model off TPU."""
    found = []
    for one in APIS.values():
        keras.utils.set_random_seed(3)
        configs = feature_configs(one, optimizer=keras.optimizers.SGD(0.1))
        layer = one.DistributedEmbedding(configs)
        model = functional_model(one, layer)
        filled(layer)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.layers[-1].set_weights([np.ones((2 * DIM, 1)), np.zeros(1)])
        history = model.fit(ratings(), epochs=2, verbose=0).history["loss"]
        found.append((history, flat(layer.get_embedding_tables())))
    (our_loss, ours), (their_loss, theirs) = found
    np.testing.assert_allclose(our_loss, their_loss, rtol=1e-5)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_on_sparsecores_fit_and_a_loop_of_ones_own_train_equally():
    """On the emulator, where Keras-RS' own code runs too."""
    found = [flat(_train_on_two_chips(one)) for one in APIS.values()]
    for ours, theirs in zip(*found, strict=True):
        assert np.ptp(ours) > 0
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def _train_on_two_chips(api: Any) -> list[Any]:
    """The tables after an epoch and after a loop of four steps more."""
    keras.utils.set_random_seed(3)
    first = keras.initializers.Constant(0.5)
    settings = {
        "placement": "sparsecore",
        "optimizer": keras.optimizers.SGD(0.1),
        "initializer": first,
    }
    with tde.testing.sparsecore_emulator(2) as strategy:
        with strategy.scope():
            model = RankingModel(
                api,
                feature_configs(api, **settings),
                table_stacking=None,  # else Keras-RS misreads its tables
            )
            compiled(model)
            model.fit(ratings(), verbose=0)
            layer = model.embedding_layer
            found = [_by_name(layer)]
        dataset = strategy.experimental_distribute_dataset(ratings())

        @tf.function
        def run_loop(iterator):
            def step(data):
                inputs, labels = data
                with tf.GradientTape() as tape:
                    result = layer(inputs)
                    loss = keras.losses.mean_squared_error(
                        labels, result["user_id"] - result["movie_id"]
                    )
                tape.gradient(loss, layer.trainable_variables)

            for _ in tf.range(4):
                strategy.run(step, args=(next(iterator),))

        run_loop(iter(dataset))
        with strategy.scope():
            found.append(_by_name(layer))
    return found


def _by_name(layer: Any) -> list[Any]:
    return [table for _, table in sorted(layer.get_embedding_tables().items())]


# --- What docs/migrating.md says is different


ROWS = np.array([[i, 10 * i] for i in range(6)], np.float32)


def small(
    api: Any,
    optimizer: Any = "sgd",
    combiner: str = "sum",
    input_shape: Any = (None, None),
    output_shape: Any = (None, 2),
) -> Any:
    """A layer of one feature, whose row i is [i, 10 i]."""
    table = api.TableConfig(
        "items", 6, 2, optimizer=optimizer, combiner=combiner
    )
    layer = api.DistributedEmbedding(
        {"seen": api.FeatureConfig("seen", table, input_shape, output_shape)}
    )
    layer.build({"seen": (None, None)[: len(input_shape)]})
    layer.weights[0].assign(ROWS)
    return layer


def look_up(layer: Any, ids: Any, weights: Any = None) -> list[Any]:
    weights = None if weights is None else {"seen": weights}
    return np.asarray(layer({"seen": ids}, weights)["seen"]).tolist()


def refusal(call: Any) -> str:
    with pytest.raises((TypeError, ValueError, tf.errors.OpError)) as raised:
        call()
    return str(raised.value)


def row_1_after_a_step(layer: Any, model_optimizer: Any) -> list[float]:
    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer({"seen": ids})["seen"])
        variables = layer.trainable_variables
        model_optimizer.apply(tape.gradient(loss, variables), variables)

    model_optimizer.build(layer.trainable_variables)
    step(tf.constant([[1, 1]]))
    return np.asarray(layer.get_embedding_tables()["items"])[1].tolist()


def test_an_own_optimizer_is_used_off_tpus():
    frozen = keras.optimizers.SGD(0.0)
    ours, theirs = (
        row_1_after_a_step(small(one, frozen), keras.optimizers.SGD(1.0))
        for one in APIS.values()
    )
    assert ours == [1, 10]
    assert theirs == [-1, 8]
    small(keras_rs.layers, "no such optimizer")
    assert "no such optimizer" in refusal(
        lambda: small(tde, "no such optimizer")
    )


def test_repeated_ids_are_summed_before_adagrad():
    def adagrad() -> Any:
        return keras.optimizers.Adagrad(
            1.0, initial_accumulator_value=0.0, epsilon=0.0
        )

    ours = row_1_after_a_step(small(tde, adagrad()), adagrad())
    assert ours == [0, 9]  # one step of length 1
    with pytest.raises(tf.errors.InvalidArgumentError):
        row_1_after_a_step(small(keras_rs.layers), adagrad())


def test_ids_outside_the_table_raise():
    ids = tf.constant([[-1, 0]])
    assert look_up(small(keras_rs.layers), ids) == [[5, 50]]
    assert "id -1" in refusal(lambda: look_up(small(tde), ids))


def test_float_ids_raise():
    ids = tf.constant([[1.9, 0.0]])
    assert look_up(small(keras_rs.layers), ids) == [[1, 10]]
    assert "integer dtype" in refusal(lambda: look_up(small(tde), ids))


def test_declared_widths_hold():
    long = tf.ragged.constant([[1, 2, 3]])
    ours, theirs = (small(one, input_shape=(None, 2)) for one in APIS.values())
    assert look_up(ours, long) == [[3, 30]]
    assert look_up(theirs, long) == [[6, 60]]
    dense = tf.constant([[1, 2, 3]])
    assert "declares 2 ids" in refusal(lambda: look_up(ours, dense))
    assert look_up(theirs, dense) == [[6, 60]]


def test_weights_of_one_id_follow_the_formula():
    ids, weights = tf.constant([1, 2]), tf.constant([0.0, 3.0])
    ours, theirs = (
        small(one, combiner="mean", input_shape=(None,))
        for one in APIS.values()
    )
    assert look_up(ours, ids, weights) == [[0, 0], [2, 20]]
    assert look_up(theirs, ids, weights) == [[1, 10], [2, 20]]


def test_one_weight_an_example_raises():
    ids, weights = tf.constant([[1, 2]]), tf.constant([2.0])
    assert look_up(small(keras_rs.layers), ids, weights) == [[6, 60]]
    message = refusal(lambda: look_up(small(tde), ids, weights))
    assert "one weight an id" in message


def test_an_output_of_positions_is_not_combined():
    shapes = {"input_shape": (None, 3), "output_shape": (None, 3, 2)}
    ids = tf.constant([[1, 2, 3]])
    ours, theirs = (small(one, **shapes) for one in APIS.values())
    assert look_up(ours, ids) == [[[1, 10], [2, 20], [3, 30]]]
    assert look_up(theirs, ids) == [[6, 60]]


@pytest.mark.parametrize("name", APIS)
def test_tables_left_to_the_default_initializer_start_different(name):
    one = APIS[name]
    layer = one.DistributedEmbedding(
        {
            key: one.FeatureConfig(
                key, one.TableConfig(key, 6, 2), (None,), (None, 2)
            )
            for key in "ab"
        }
    )
    layer.build({"a": (None,), "b": (None,)})
    a, b = map(np.asarray, layer.get_embedding_tables().values())
    assert np.array_equal(a, b) == (name == "keras_rs")


@pytest.mark.parametrize("name", APIS)
def test_the_order_of_weights_is_that_of_the_configuration(name):
    one = APIS[name]
    layer = one.DistributedEmbedding(
        {
            key: one.FeatureConfig(
                key, one.TableConfig(key, rows, 2), (None,), (None, 2)
            )
            for key, rows in (("z", 5), ("a", 7))
        }
    )
    layer.build({"z": (None,), "a": (None,)})
    rows = [weight.shape[0] for weight in layer.weights]
    assert rows == ([5, 7] if name == "tf_distembed" else [7, 5])


def test_a_checkpoint_holds_the_tables(tmp_path: Path):
    def values_in_checkpoint(layer: Any, name: str) -> list[str]:
        inputs = {"seen": keras.Input((None,), dtype="int32")}
        model = keras.Model(inputs, layer(inputs)["seen"])
        path = tf.train.Checkpoint(model).save(tmp_path / name)
        return [
            key
            for key, shape in tf.train.list_variables(path)
            if shape == list(ROWS.shape)
        ]

    assert len(values_in_checkpoint(small(tde), "ours")) == 1
    assert values_in_checkpoint(small(keras_rs.layers), "theirs") == []


def test_symbolic_outputs_have_the_batch_of_the_inputs():
    shapes = {"input_shape": (BATCH, 2), "output_shape": (BATCH, 2)}
    inputs = {"seen": keras.Input((2,), dtype="int32")}
    ours, theirs = (small(one, **shapes) for one in APIS.values())
    assert ours(inputs)["seen"].shape == (None, 2)
    assert theirs(inputs)["seen"].shape == (BATCH, 2)


def test_the_dtype_of_the_layer_reaches_its_tables():
    found = []
    for one in APIS.values():
        table = one.TableConfig("items", 6, 2)
        feature = one.FeatureConfig("seen", table, (None,), (None, 2))
        layer = one.DistributedEmbedding({"seen": feature}, dtype="bfloat16")
        layer.build({"seen": (None,)})
        found.append(keras.backend.standardize_dtype(layer.weights[0].dtype))
    assert found == ["bfloat16", "float32"]


def test_adam_on_sparsecores_corrects_the_bias_unlike_there():
    """The first step of Keras' Adam is of the length of the rate."""
    moves = []
    for one in APIS.values():
        table = one.TableConfig(
            "items",
            16,
            8,
            initializer="zeros",
            optimizer=keras.optimizers.Adam(0.5),
            combiner="sum",
            placement="sparsecore",
        )
        feature = one.FeatureConfig("seen", table, (BATCH,), (BATCH, 8))
        with tde.testing.sparsecore_emulator() as strategy:
            with strategy.scope():
                layer = one.DistributedEmbedding(
                    {"seen": feature}, table_stacking=None
                )
                layer.build({"seen": (BATCH,)})

            def step(ids, layer=layer):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(layer({"seen": ids})["seen"])
                tape.gradient(loss, layer.trainable_variables)

            tf.function(lambda ids: strategy.run(step, args=(ids,)))(
                tf.range(BATCH)
            )
            with strategy.scope():
                moves.append(-np.asarray(_by_name(layer)[0])[1])
    np.testing.assert_allclose(moves[0], 0.5, rtol=1e-4)
    # Without the correction: by (1 - 0.9) / sqrt(1 - 0.999).
    np.testing.assert_allclose(moves[1], 0.5 * 10**0.5, rtol=1e-4)


def test_a_configuration_can_be_read_twice():
    for one in APIS.values():
        layer = small(one)
        config = layer.get_config()
        type(layer).from_config(config)
        if one is tde:
            type(layer).from_config(config)
        else:
            assert refusal(lambda: type(layer).from_config(config))  # noqa: B023


def test_padding_is_no_part_of_the_mean_in_the_simple_layer():
    ids = tf.constant([[0, 2]])
    ours, theirs = (
        one.EmbedReduce(6, 2, mask_zero=True, weights=ROWS)(ids)
        .numpy()
        .tolist()
        for one in APIS.values()
    )
    assert ours == [[2, 20]]
    assert theirs == [[1, 10]]
