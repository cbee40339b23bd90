"""A model that predicts ratings: the layer with a small dense tower."""

from __future__ import annotations

import keras

from tf_distembed.config import FeatureConfig, TableConfig
from tf_distembed.datasets.movielens import AGE_GROUPS, MovieLens
from tf_distembed.layer import DistributedEmbedding

#: Features of one id a rating, fed as int64 `[B]`.
SINGLE = ("user", "item", "age_group", "occupation")
#: Features of weighted bags, fed ragged beside `<feature>_weights`.
BAGS = ("genres", "history")


def rating_features(
    data: MovieLens, embedding_dim: int, history_size: int
) -> dict[str, FeatureConfig]:
    """Six features on five tables, each table with its own optimizer.

    `item` and `history` look up in one table: what an item is, is learned
    from the ratings of it and from the histories that it stands in.
    """
    # Adagrad slows down on rows that come often, which suits items and genres
    # of very unequal popularity; a user's few ratings want Adam's even steps;
    # age groups and occupations come in every batch, and plain steps do.
    vocabularies = {
        "user": data.num_users,
        "item": data.num_items,
        "genre": len(data.genre_names),
        "age_group": len(AGE_GROUPS),
        "occupation": len(data.occupation_names),
    }
    optimizers = {
        "user": keras.optimizers.Adam(0.002),
        "item": keras.optimizers.Adagrad(0.1),
        "genre": keras.optimizers.Adagrad(0.05),
        "age_group": keras.optimizers.SGD(0.05),
        "occupation": keras.optimizers.SGD(0.05),
    }
    # "sqrtn" keeps the length of a history from deciding how loud it is, and
    # bears weights of both signs, whose sum a mean would divide by.
    combiners = {"item": "sqrtn"}
    tables = {
        name: TableConfig(
            name,
            vocabulary,
            embedding_dim,
            initializer=keras.initializers.RandomNormal(stddev=0.05),
            optimizer=optimizers[name],
            combiner=combiners.get(name, "mean"),
        )
        for name, vocabulary in vocabularies.items()
    }
    looked_up_in = {name: name for name in SINGLE} | {
        "genres": "genre",
        "history": "item",
    }
    input_shapes = {"genres": (None, None), "history": (None, history_size)}
    return {
        feature: FeatureConfig(
            feature,
            tables[table],
            input_shapes.get(feature, (None,)),
            (None, embedding_dim),
        )
        for feature, table in looked_up_in.items()
    }


def build_rating_model(
    features: dict[str, FeatureConfig], mean_rating: float
) -> keras.Model:
    """A functional model for the batches of `RatingFeatures.dataset`.

    Args:
        features: What `rating_features` returned.
        mean_rating: Where predictions start from.

    Returns:
        A compiled model; inputs by name, output float32 `[B, 1]`.
    """
    inputs = {
        name: keras.Input((), dtype="int64", name=name) for name in SINGLE
    }
    for name in BAGS:
        weights = f"{name}_weights"
        inputs[name] = keras.Input(
            (None,), dtype="int64", ragged=True, name=name
        )
        inputs[weights] = keras.Input(
            (None,), dtype="float32", ragged=True, name=weights
        )
    layer = DistributedEmbedding(features, name="embedding")
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
