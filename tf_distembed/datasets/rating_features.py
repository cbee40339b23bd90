"""What a model is told about a rating before it predicts it, as `tf.data`."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_distembed.datasets.movielens import MovieLens

# An item with few ratings is pulled to the mean of all ratings as strongly as
# this many ratings of exactly that mean would.
SHRINKAGE = 5.0


class RatingFeatures:
    """Features of ratings, computed from the training part alone.

    A batch is `(inputs, ratings)`. `inputs` holds, for B ratings:

        user, item, age_group, occupation   int64 [B]
        genres, genres_weights              ragged [B, None]
        history, history_weights            ragged [B, None]

        user  item  genres   history        history_weights
        17    3     [1, 4]   [8, 90, 41]    [0.7, -1.2, 0.1]
        203   90    [2]      []             []              a user's only rating

    `genres` are those of the item. Their weights are log(1 + I / n) for a
    genre that n of the I items have: a rare genre says more.

    `history` are other items that the same user rated in the training part,
    never the item of the rating itself, whether that is trained or tested on.
    A weight is how much higher the user rated the item than its mean. Of a
    long history the `history_size` items with the most training ratings are
    taken, since their table rows are learned best.

    Args:
        data: All ratings.
        train: int64 places of the training part in `data.rating`.
        history_size: The longest history, at least 1.

    Attributes:
        mean_rating: The mean of the training ratings.
        item_mean: float32 `[I]`, the mean training rating of each item, shrunk
            to `mean_rating`; the baseline that a model has to beat.

    Raises:
        ValueError: `history_size` is below 1, or `train` is empty.
    """

    def __init__(
        self, data: MovieLens, train: np.ndarray, *, history_size: int = 50
    ) -> None:
        if history_size < 1:
            raise ValueError(
                "history_size must be at least 1. "
                f"Received: history_size={history_size}"
            )
        if not len(train):
            raise ValueError("there is no rating to train on")
        self._data = data
        self._history_size = history_size
        rated, ratings = data.item[train], data.rating[train]
        self.mean_rating = float(ratings.mean(dtype=np.float64))
        counts = np.bincount(rated, minlength=data.num_items)
        excess = np.bincount(
            rated, ratings - self.mean_rating, minlength=data.num_items
        )
        self.item_mean = (
            self.mean_rating + excess / (counts + SHRINKAGE)
        ).astype(np.float32)
        self._histories = self._longest_histories(train, counts)
        self._genres = _ragged(data.genres, data.genre_splits)
        items_of_genre = np.bincount(
            data.genres, minlength=len(data.genre_names)
        )
        self._genre_weight = np.log1p(
            data.num_items / np.maximum(items_of_genre, 1)
        ).astype(np.float32)

    def _longest_histories(
        self, train: np.ndarray, counts: np.ndarray
    ) -> tf.RaggedTensor:
        """Training places by user, ragged `[U, up to history_size + 1]`.

        One more than is used, since the item of the rating itself goes.
        """
        data = self._data
        # Of an item that a user rated twice, the later rating.
        key = data.user[train] * data.num_items + data.item[train]
        _, from_the_end = np.unique(key[::-1], return_index=True)
        places = train[len(train) - 1 - from_the_end]
        users, items = data.user[places], data.item[places]
        order = np.lexsort((items, -counts[items], users))
        lengths = np.bincount(users, minlength=data.num_users)
        starts = np.cumsum(lengths) - lengths
        rank = np.arange(len(places)) - np.repeat(starts, lengths)
        kept = places[order][rank <= self._history_size]
        lengths = np.minimum(lengths, self._history_size + 1)
        return _ragged(kept, np.cumsum([0, *lengths]))

    def dataset(
        self,
        rows: np.ndarray,
        batch_size: int,
        *,
        shuffle_seed: int | None = None,
    ) -> tf.data.Dataset:
        """Batches of `(inputs, ratings)`; `ratings` is float32 `[B]`.

        Args:
            rows: int64 places in `data.rating`.
            batch_size: B; the last batch may be smaller.
            shuffle_seed: `None` keeps the order of `rows`. A number shuffles
                them anew in every epoch, the same way in every run.
        """
        rows = np.asarray(rows, dtype=np.int64)
        places = tf.data.Dataset.range(len(rows))
        if shuffle_seed is not None:
            places = places.shuffle(
                max(len(rows), 1), shuffle_seed, reshuffle_each_iteration=True
            )
        # Whole batches are looked up at once: an element a rating would spend
        # the epoch's time on slicing ragged tensors.
        return (
            places.batch(batch_size)
            .map(
                lambda batch: self._batch(tf.gather(rows, batch)),
                num_parallel_calls=tf.data.AUTOTUNE,
                deterministic=True,
            )
            .prefetch(tf.data.AUTOTUNE)
        )

    def _batch(self, rows: tf.Tensor) -> tuple[dict[str, Any], tf.Tensor]:
        data = self._data
        user, item = tf.gather(data.user, rows), tf.gather(data.item, rows)
        genres = tf.gather(self._genres, item)
        history, weights = self._history(user, item)
        inputs = {
            "user": user,
            "item": item,
            "age_group": tf.gather(data.age_group, user),
            "occupation": tf.gather(data.occupation, user),
            "genres": genres,
            "genres_weights": genres.with_values(
                tf.gather(self._genre_weight, genres.values)
            ),
            "history": history,
            "history_weights": weights,
        }
        return inputs, tf.gather(data.rating, rows)

    def _history(
        self, user: tf.Tensor, item: tf.Tensor
    ) -> tuple[tf.RaggedTensor, tf.RaggedTensor]:
        data = self._data
        places = tf.gather(self._histories, user)
        rated = tf.gather(data.item, places.values)
        other = tf.not_equal(rated, tf.gather(item, places.value_rowids()))
        places = tf.ragged.boolean_mask(places, places.with_values(other))
        places = places[:, : self._history_size]
        rated = tf.gather(data.item, places.values)
        excess = tf.gather(data.rating, places.values) - tf.gather(
            self.item_mean, rated
        )
        return places.with_values(rated), places.with_values(excess)


def _ragged(values: np.ndarray, splits: np.ndarray) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_splits(
        values.astype(np.int64), splits.astype(np.int64)
    )
