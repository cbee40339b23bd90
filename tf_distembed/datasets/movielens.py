"""MovieLens-100K: 100,000 ratings of 1,682 films by 943 people.

The data belong to GroupLens Research and are not part of this package: they
are read from a folder, or fetched and kept in the user's cache.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tf_distembed.datasets import _movielens_files, _sources
from tf_distembed.datasets._sources import DataNotFoundError, SourceError

OFFICIAL_URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
# Published by GroupLens beside the archive.
OFFICIAL_MD5 = "0e33842e24a9c977be4e0107933c0723"
# A recommender library whose wheel carries the data set as an example.
WHEEL = "recbole==1.2.1"
WHEEL_SHA256 = (
    "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
)

DEFAULT_CACHE = "~/.cache/tf_distembed"

LICENCE = (
    "MovieLens-100K (c) GroupLens Research, University of Minnesota: free for "
    "research, no redistribution and no commercial use without permission; "
    "cite Harper and Konstan 2015, doi:10.1145/2827872."
)

# Age groups as GroupLens gives them in its later data sets.
AGE_GROUPS = ("under 18", "18-24", "25-34", "35-44", "45-49", "50-55", "56+")
_AGE_GROUP_STARTS = (18, 25, 35, 45, 50, 56)


@dataclasses.dataclass(frozen=True, eq=False)
class MovieLens:
    """Ratings, the people who gave them and the films they are about.

    Users and items are numbered from 0 in the order of the ids in the files.
    Ratings stand in the order of user, time, item, whatever file they are
    from. With N ratings, U users, I items and G genres of items in all:

    Attributes:
        user: int64 `[N]`, which user rated.
        item: int64 `[N]`, which item was rated.
        rating: float32 `[N]`, 1 to 5.
        timestamp: int64 `[N]`, seconds since 1970.
        age_group: int64 `[U]`, a place in `AGE_GROUPS`.
        occupation: int64 `[U]`, a place in `occupation_names`.
        titles: I titles, without the year.
        years: int64 `[I]`, 0 where the files name none.
        genres: int64 `[G]`, places in `genre_names`, item after item.
        genre_splits: int64 `[I + 1]`, item i has the genres from
            `genre_splits[i]` to before `genre_splits[i + 1]`.
        occupation_names: The occupations that occur, sorted.
        genre_names: The genres that occur, sorted.
        source: Where the files came from, for people to read.
    """

    user: np.ndarray
    item: np.ndarray
    rating: np.ndarray
    timestamp: np.ndarray
    age_group: np.ndarray
    occupation: np.ndarray
    titles: tuple[str, ...]
    years: np.ndarray
    genres: np.ndarray
    genre_splits: np.ndarray
    occupation_names: tuple[str, ...]
    genre_names: tuple[str, ...]
    source: str

    @property
    def num_users(self) -> int:
        """U, the number of users, those without a rating included."""
        return len(self.age_group)

    @property
    def num_items(self) -> int:
        """I, the number of items, those without a rating included."""
        return len(self.titles)

    def split(
        self, test_fraction: float = 0.1, seed: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Splits the ratings at random.

        Args:
            test_fraction: The part of the ratings to test on, in (0, 1).
            seed: The same seed gives the same split on every machine.

        Returns:
            (train, test): int64 places in `rating`, each sorted; together
            they hold every rating once, and neither is empty.

        Raises:
            ValueError: `test_fraction` is outside (0, 1), or leaves one part
                without a rating.
        """
        if not 0.0 < test_fraction < 1.0:
            raise ValueError(
                "test_fraction must be between 0 and 1. "
                f"Received: test_fraction={test_fraction}"
            )
        total = len(self.rating)
        size = round(total * test_fraction)
        if not 0 < size < total:
            raise ValueError(
                f"test_fraction={test_fraction} of {total} ratings leaves no "
                f"rating to {'train' if size else 'test'} on"
            )
        shuffled = np.random.default_rng(seed).permutation(total)
        return np.sort(shuffled[size:]), np.sort(shuffled[:size])


def load_movielens_100k(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    report: Callable[[str], object] = print,
) -> MovieLens:
    """Reads MovieLens-100K, fetching it when it is not on this machine.

    Sources, the first that works: `data_dir`, and nothing else when it is
    given; the cache; GroupLens' own site; the copy in the wheel of the
    RecBole library, which is downloaded with pip, read and not installed.
    What was fetched has its checksum compared and goes to the cache.

    Args:
        data_dir: A folder with u.data, u.item, u.user and u.genre, or with
            ml-100k.inter, ml-100k.item and ml-100k.user, or with a folder
            `ml-100k` that holds them.
        cache_dir: Where fetched files are kept; `~/.cache/tf_distembed` when
            `None`.
        report: Is called with lines for people: the source, the licence, and
            why a source was passed over.

    Raises:
        DataNotFoundError: No source works; names each with its reason.

    Example:

    ```python
    from tf_distembed import datasets

    data = datasets.load_movielens_100k()
    train, test = data.split(test_fraction=0.1, seed=0)
    ```
    """
    forms = (_movielens_files.GROUPLENS, _movielens_files.RECBOLE)
    cache = Path(cache_dir or DEFAULT_CACHE).expanduser() / "ml-100k"
    # Each: what to call it, how to get its files, whether to keep them.
    sources: list[tuple[str, Callable[[], _sources.Files], bool]]
    if data_dir is not None:
        folder = Path(data_dir).expanduser()
        sources = [
            (
                f"the folder {folder}",
                lambda: _sources.read_folder(folder, forms),
                False,
            )
        ]
    else:
        sources = [
            (
                f"the cache {cache}",
                lambda: _sources.read_folder(cache, forms),
                False,
            ),
            (f"GroupLens ({OFFICIAL_URL})", _official_files, True),
            (f"the wheel of {WHEEL}", _wheel_files, True),
        ]
    failures = []
    for name, fetch, keep in sources:
        if keep:
            report(f"Fetching MovieLens-100K from {name}")
        try:
            files = fetch()
            data = _movielens(_movielens_files.parse(files), source=name)
        except (SourceError, ValueError) as error:
            failures.append(f"{name}: {error}")
            report(f"Not from {failures[-1]}")
            continue
        report(f"MovieLens-100K from {name}")
        report(LICENCE)
        if keep:
            _keep(cache, files, report)
        return data
    advice = (
        "Leave data_dir out to use the cache or to download the data."
        if data_dir is not None
        else f"Unpack {OFFICIAL_URL} somewhere and name that folder as "
        "data_dir."
    )
    raise DataNotFoundError(
        "MovieLens-100K could not be read:\n"
        + "".join(f"  {failure}\n" for failure in failures)
        + advice
    )


def _official_files() -> _sources.Files:
    archive = _sources.download(OFFICIAL_URL)
    _sources.check_digest(archive, "md5", OFFICIAL_MD5)
    return _sources.unpack(archive, _movielens_files.GROUPLENS)


def _wheel_files() -> _sources.Files:
    wheel = _sources.download_wheel(WHEEL)
    _sources.check_digest(wheel, "sha256", WHEEL_SHA256)
    return _sources.unpack(wheel, _movielens_files.RECBOLE)


def _keep(
    cache: Path, files: _sources.Files, report: Callable[[str], object]
) -> None:
    """Writes the cache; a machine that cannot keep it still has the data."""
    try:
        for name, content in files.items():
            _sources.replace_file(cache / name, content)
    except OSError as error:
        report(f"Could not write the cache: {error}")
    else:
        report(f"Kept in {cache}")


def _movielens(tables: _movielens_files.Tables, source: str) -> MovieLens:
    """Numbers users, items, genres and occupations from 0 and checks them."""
    users = sorted(tables.users, key=lambda user: user.raw_id)
    items = sorted(tables.items, key=lambda item: item.raw_id)
    if not len(tables.ratings):
        raise ValueError("the files hold no rating")
    if not np.isfinite(tables.ratings).all():
        raise ValueError("a rating line holds a value that is not finite")
    user = _places("user", tables.ratings[:, 0], [u.raw_id for u in users])
    item = _places("item", tables.ratings[:, 1], [i.raw_id for i in items])
    rating = tables.ratings[:, 2].astype(np.float32)
    timestamp = tables.ratings[:, 3].astype(np.int64)
    order = np.lexsort((rating, item, timestamp, user))

    occupation_names = tuple(sorted({u.occupation for u in users}))
    genre_names = tuple(sorted({g for i in items for g in i.genres}))
    genres = [sorted(map(genre_names.index, i.genres)) for i in items]
    return MovieLens(
        user=user[order],
        item=item[order],
        rating=rating[order],
        timestamp=timestamp[order],
        age_group=np.searchsorted(
            _AGE_GROUP_STARTS, [u.age for u in users], side="right"
        ).astype(np.int64),
        occupation=np.array(
            [occupation_names.index(u.occupation) for u in users], np.int64
        ),
        titles=tuple(i.title for i in items),
        years=np.array([i.year for i in items], np.int64),
        genres=np.array([g for row in genres for g in row], np.int64),
        genre_splits=np.cumsum([0, *map(len, genres)], dtype=np.int64),
        occupation_names=occupation_names,
        genre_names=genre_names,
        source=source,
    )


def _places(what: str, raw_ids: np.ndarray, known: Sequence[int]) -> np.ndarray:
    """The place of each raw id in the sorted `known`, int64 `[N]`."""
    vocabulary = np.array(known, dtype=np.int64)
    if len(np.unique(vocabulary)) != len(vocabulary):
        raise ValueError(f"two lines describe one {what}")
    places = np.searchsorted(vocabulary, raw_ids)
    found = places < len(vocabulary)
    found[found] = vocabulary[places[found]] == raw_ids[found]
    if not found.all():
        strangers = np.unique(raw_ids[~found])[:5]
        raise ValueError(
            f"ratings name {what}s that no line describes: "
            + ", ".join(f"{s:g}" for s in strangers)
        )
    return places.astype(np.int64)
