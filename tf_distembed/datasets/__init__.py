"""Readers of public rating data, as NumPy arrays and as `tf.data`."""

from tf_distembed.datasets._sources import DataNotFoundError
from tf_distembed.datasets.movielens import MovieLens, load_movielens_100k
from tf_distembed.datasets.rating_features import RatingFeatures

__all__ = [
    "DataNotFoundError",
    "MovieLens",
    "RatingFeatures",
    "load_movielens_100k",
]
