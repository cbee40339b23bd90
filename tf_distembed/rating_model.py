"""A model that predicts ratings: the layer with a small dense tower."""

from __future__ import annotations

import keras

import tf_distembed as tde
from tf_distembed.datasets.movielens import AGE_GROUPS, MovieLens

#: Features of one id a rating, fed as int64 `[B]`.
SINGLE = ("user", "item", "age_group", "occupation")
#: Features of weighted bags, fed ragged beside `<feature>_weights`.
BAGS = ("genres", "history")


def rating_features(
    data: MovieLens, embedding_dim: int, history_size: int
) -> dict[str, tde.FeatureConfig]:
    """Six features on five tables, each table with its own optimizer.

    `item` and `history` look up in one table: what an item is, is learned
    from the ratings of it and from the histories that it stands in.
    """
    # Adagrad slows down for rows that come often, which suits items of very
    # unequal popularity; a user's few ratings want Adam's even steps; the
    # small tables see thousands of gradients a step and are held back.
    users = tde.TableConfig(
        "user",
        data.num_users,
        embedding_dim,
        initializer=keras.initializers.RandomNormal(stddev=0.05),
        optimizer=keras.optimizers.Adam(0.002),
    )
    items = tde.TableConfig(
        "item",
        data.num_items,
        embedding_dim,
        initializer=keras.initializers.RandomNormal(stddev=0.05),
        optimizer=keras.optimizers.Adagrad(0.1),
        # Keeps the length of a history from deciding how loud it is.
        combiner="sqrtn",
    )
    genres = tde.TableConfig(
        "genre",
        len(data.genre_names),
        embedding_dim,
        initializer=keras.initializers.RandomNormal(stddev=0.05),
        optimizer=keras.optimizers.Adagrad(0.05),
        combiner="mean",
    )
    age_groups = tde.TableConfig(
        "age_group",
        len(AGE_GROUPS),
        embedding_dim,
        initializer=keras.initializers.RandomNormal(stddev=0.05),
        optimizer=keras.optimizers.SGD(0.05),
    )
    occupations = tde.TableConfig(
        "occupation",
        len(data.occupation_names),
        embedding_dim,
        initializer=keras.initializers.RandomNormal(stddev=0.05),
        optimizer=keras.optimizers.SGD(0.05),
    )
    one, bag = (None,), (None, None)
    row = (None, embedding_dim)
    return {
        "user": tde.FeatureConfig("user", users, one, row),
        "item": tde.FeatureConfig("item", items, one, row),
        "age_group": tde.FeatureConfig("age_group", age_groups, one, row),
        "occupation": tde.FeatureConfig("occupation", occupations, one, row),
        "genres": tde.FeatureConfig("genres", genres, bag, row),
        "history": tde.FeatureConfig(
            "history", items, (None, history_size), row
        ),
    }


def build_rating_model(
    features: dict[str, tde.FeatureConfig], mean_rating: float
) -> keras.Model:
    """A functional model for the batches of `RatingFeatures.dataset`.

    Args:
        features: What `rating_features` returned.
        mean_rating: Where predictions start from.

    Returns:
        A compiled model; inputs by name, output float32 `[B, 1]`.
    """
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in SINGLE}
    for name in BAGS:
        weights = f"{name}_weights"
        inputs[name] = keras.Input(
            (None,), dtype="int64", ragged=True, name=name
        )
        inputs[weights] = keras.Input(
            (None,), dtype="float32", ragged=True, name=weights
        )
    layer = tde.DistributedEmbedding(features, name="embedding")
    found = layer(
        {name: inputs[name] for name in features},
        weights={name: inputs.get(f"{name}_weights") for name in features},
    )
    # A rating is mostly about how well a person and an item match, which
    # products of their vectors say and sums do not.
    matches = [
        keras.layers.Multiply()([found[one], found[other]])
        for one, other in (
            ("user", "item"),
            ("user", "genres"),
            ("history", "item"),
            ("history", "genres"),
        )
    ]
    hidden = keras.layers.Concatenate()([*found.values(), *matches])
    for units in (32, 16):
        hidden = keras.layers.Dense(units, activation="relu")(hidden)
    rating = keras.layers.Dense(
        1,
        bias_initializer=keras.initializers.Constant(mean_rating),
        name="rating",
    )(hidden)
    model = keras.Model(inputs, rating, name="movielens_ratings")
    model.compile(
        optimizer=keras.optimizers.Adam(0.001),
        loss="mse",
        metrics=[keras.metrics.RootMeanSquaredError(name="rmse")],
    )
    return model
