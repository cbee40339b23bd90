"""MovieLens-100K: both file forms, every source, the split, the features.

No test reaches the network: what would is replaced, or fails the test.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.datasets.fake_movielens import SMALL, random_fake, write
from tf_distembed.datasets import (
    DataNotFoundError,
    MovieLens,
    RatingFeatures,
    _sources,
    load_movielens_100k,
    movielens,
)
from tf_distembed.datasets.rating_features import SHRINKAGE

GROUPLENS, RECBOLE = SMALL.grouplens_files(), SMALL.recbole_files()


def silent(_: str) -> None:
    """Takes the place of print."""


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """A test that asks the network or pip for something fails."""

    def refuse(*args, **kwargs):
        raise AssertionError(f"the network was asked: {args} {kwargs}")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setattr(subprocess, "run", refuse)


def load(folder: Path, files: dict[str, bytes]) -> MovieLens:
    return load_movielens_100k(write(folder, files), report=silent)


# --- the two forms


@pytest.mark.parametrize("files", [GROUPLENS, RECBOLE])
def test_either_form_gives_this_typed_result(tmp_path, files):
    data = load(tmp_path, files)
    expected = {
        # In the order of user, time, item; users are 1, 2, 3, 5, 9.
        "user": [0, 0, 0, 1, 3, 4, 4],
        "item": [0, 1, 2, 2, 1, 0, 1],
        "timestamp": [800, 900, 900, 650, 100, 700, 710],
        "age_group": [0, 1, 4, 5, 6],
        "occupation": [1, 2, 2, 1, 0],
        "years": [1995, 1979, 0, 1999],
        "genres": [1, 4, 3, 5, 2, 0, 1],
        "genre_splits": [0, 2, 4, 5, 7],
    }
    for name, values in expected.items():
        found = getattr(data, name)
        assert found.dtype == np.int64, name
        assert found.tolist() == values, name
    assert data.rating.dtype == np.float32
    assert data.rating.tolist() == [4, 5, 3, 2, 4, 3, 1]
    assert data.occupation_names == ("none", "student", "writer")
    assert data.genre_names == (
        "Children's",
        "Drama",
        "Film-Noir",
        "Horror",
        "Musical",
        "Sci-Fi",
    )
    assert data.titles == (
        "Misérables, Les",
        "Alien (the first)",
        "unknown",
        "Video Toys",
    )
    assert (data.num_users, data.num_items) == (5, 4)


def test_both_forms_of_larger_data_are_equal(tmp_path):
    fake = random_fake()
    one = load(tmp_path / "one", fake.grouplens_files())
    other = load(tmp_path / "other", fake.recbole_files())
    for field in dataclasses.fields(MovieLens):
        if field.name == "source":
            continue
        left, right = getattr(one, field.name), getattr(other, field.name)
        np.testing.assert_array_equal(left, right, err_msg=field.name)
        assert type(left) is type(right)


def test_columns_of_a_typed_header_may_stand_in_any_order(tmp_path):
    turned = {
        name: b"".join(
            b"\t".join(reversed(line.split(b"\t"))) + b"\n"
            for line in content.splitlines()
        )
        for name, content in RECBOLE.items()
    }
    assert turned["ml-100k.inter"].startswith(b"timestamp:float\t")
    data = load(tmp_path, turned)
    assert data.rating.tolist() == [4, 5, 3, 2, 4, 3, 1]
    assert data.titles[0] == "Misérables, Les"


def test_windows_line_ends_are_read(tmp_path):
    files = {n: c.replace(b"\n", b"\r\n") for n, c in GROUPLENS.items()}
    data = load(tmp_path, files)
    assert data.occupation_names == ("none", "student", "writer")
    assert data.genres.tolist() == [1, 4, 3, 5, 2, 0, 1]


@pytest.mark.parametrize(
    "name, old, new, message",
    [
        ("u.user", b"|56|", b"|old|", "u.user, line 1: .*'old' found"),
        ("u.user", b"9|56|", b"9,56|", "u.user, line 1: 5 fields .* 4 found"),
        ("u.item", b"|0\n", b"|2\n", "u.item, line .*neither 0 nor 1"),
        ("u.data", b"\t700", b"\tnow", "u.data: .*'now'"),
        ("u.data", b"\t700", b"\tnan", "not finite"),
        ("u.data", b"9\t10\t", b"8\t10\t", "name users that no line .*: 8"),
        ("u.data", b"9\t10\t", b"9\t99\t", "name items that no line .*: 99"),
        ("u.user", b"9|56|", b"5|56|", "two lines describe one user"),
        ("ml-100k.item", b"class", b"genre", "line 1: no column class"),
        ("ml-100k.user", b"\t56\t", b"\t\t", "ml-100k.user, line 2: .*''"),
        ("ml-100k.item", b"\xc3\xa9", b"\xe9", "ml-100k.item: .*utf-8"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(
    tmp_path, name, old, new, message
):
    files = dict(GROUPLENS if name in GROUPLENS else RECBOLE)
    assert old in files[name]
    files[name] = files[name].replace(old, new)
    with pytest.raises(DataNotFoundError, match=message):
        load(tmp_path, files)


def test_files_without_a_rating_are_refused(tmp_path):
    for number, files in enumerate((GROUPLENS, RECBOLE)):
        name = next(iter(files))
        header = files[name].split(b"\n")[0] + b"\n" if number else b""
        with pytest.raises(DataNotFoundError, match="hold no rating"):
            load(tmp_path / str(number), files | {name: header})


# --- data_dir


def test_the_unpacked_archive_may_be_named_by_its_parent(tmp_path):
    write(tmp_path / "ml-100k", GROUPLENS)
    lines: list[str] = []
    data = load_movielens_100k(tmp_path, report=lines.append)
    assert len(data.rating) == 7
    assert str(tmp_path) in data.source
    assert any("GroupLens Research" in line for line in lines)
    assert any(data.source in line for line in lines)


def test_an_incomplete_data_dir_is_the_only_source_and_says_what_it_lacks(
    tmp_path,
):
    write(tmp_path, {"u.data": b"1\t1\t1\t1\n"})
    cache = tmp_path / "cache"
    write(cache / "ml-100k", GROUPLENS)
    with pytest.raises(DataNotFoundError) as caught:
        load_movielens_100k(tmp_path, cache_dir=cache, report=silent)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "u.data, u.item, u.user, u.genre or ml-100k.inter" in message
    assert "of these only u.data" in message
    assert "Leave data_dir out" in message


def test_a_data_dir_that_is_no_folder_is_said_to_be_none(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for path, reason in (
        (tmp_path / "gone", "it does not exist"),
        (file, "it is not a folder"),
    ):
        with pytest.raises(DataNotFoundError, match=reason):
            load_movielens_100k(path, report=silent)


# --- cache, official site, wheel


def zipped(files: dict[str, bytes], folder: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"{folder}/{name}", content)
    return packed.getvalue()


OFFICIAL = zipped(GROUPLENS, "ml-100k")
WHEEL = zipped(RECBOLE, "recbole/dataset_example/ml-100k")


@dataclasses.dataclass
class World:
    """What the official site and pip answer; an exception is raised."""

    official: bytes | Exception = OFFICIAL
    wheel: bytes | str = WHEEL
    asked: list[str] = dataclasses.field(default_factory=list)

    def urlopen(self, url: str, timeout: float):
        self.asked.append(url)
        assert timeout <= 15
        if isinstance(self.official, Exception):
            raise self.official
        return io.BytesIO(self.official)

    def run(self, command: list[str], **kwargs):
        self.asked.append(" ".join(command))
        if isinstance(self.wheel, str):
            return subprocess.CompletedProcess(command, 1, "", self.wheel)
        (folder,) = (a[7:] for a in command if a.startswith("--dest="))
        Path(folder, "recbole-1.2.1-py3-none-any.whl").write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def world(monkeypatch, no_network) -> World:
    """A world where both downloads work and have the checksums they should."""
    world = World()
    monkeypatch.setattr(urllib.request, "urlopen", world.urlopen)
    monkeypatch.setattr(subprocess, "run", world.run)
    monkeypatch.setattr(
        movielens, "OFFICIAL_MD5", hashlib.md5(OFFICIAL).hexdigest()
    )
    monkeypatch.setattr(
        movielens, "WHEEL_SHA256", hashlib.sha256(WHEEL).hexdigest()
    )
    return world


def test_the_official_site_is_asked_once_then_the_cache(tmp_path, world):
    first = load_movielens_100k(cache_dir=tmp_path, report=silent)
    assert "GroupLens (https://files.grouplens.org" in first.source
    second = load_movielens_100k(cache_dir=tmp_path, report=silent)
    assert str(tmp_path) in second.source
    assert world.asked == [movielens.OFFICIAL_URL]
    np.testing.assert_array_equal(first.rating, second.rating)
    kept = {p.name: p.read_bytes() for p in (tmp_path / "ml-100k").iterdir()}
    assert kept == GROUPLENS


def test_the_cache_is_in_the_home_folder_when_none_is_named(
    tmp_path, world, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    load_movielens_100k(report=silent)
    assert (tmp_path / ".cache/tf_distembed/ml-100k/u.data").is_file()


def test_the_wheel_is_downloaded_alone_when_the_site_is_out_of_reach(
    tmp_path, world
):
    world.official = urllib.error.URLError("no route to host")
    lines: list[str] = []
    data = load_movielens_100k(cache_dir=tmp_path, report=lines.append)
    assert "recbole==1.2.1" in data.source
    assert "--no-deps" in world.asked[1]
    assert "pip download" in world.asked[1]
    assert any("no route to host" in line for line in lines)
    again = load_movielens_100k(cache_dir=tmp_path, report=silent)
    assert len(world.asked) == 2
    assert again.titles == data.titles


def test_a_changed_archive_is_refused_and_the_next_source_asked(
    tmp_path, world
):
    world.official = OFFICIAL + b"more"
    lines: list[str] = []
    data = load_movielens_100k(cache_dir=tmp_path, report=lines.append)
    assert "recbole" in data.source
    assert any("md5 checksum is" in line for line in lines)


def test_one_error_names_every_source_and_its_reason(tmp_path, world):
    world.official = urllib.error.HTTPError("u", 503, "busy", {}, None)
    world.wheel = "WARNING: slow\nERROR: no matching distribution\n"
    with pytest.raises(DataNotFoundError) as caught:
        load_movielens_100k(cache_dir=tmp_path, report=silent)
    message = str(caught.value)
    for name, reason in (
        (str(tmp_path / "ml-100k"), "it does not exist"),
        (movielens.OFFICIAL_URL, "busy"),
        ("recbole==1.2.1", "ERROR: no matching distribution"),
    ):
        (line,) = [x for x in message.splitlines() if f"{name}" in x][:1]
        assert reason in line
    assert "data_dir" in message.splitlines()[-1]


def test_a_changed_wheel_or_one_without_the_files_is_refused(
    tmp_path, world, monkeypatch
):
    world.official = TimeoutError("timed out")
    world.wheel = zipped({"other.txt": b""}, "recbole")
    with pytest.raises(DataNotFoundError, match="sha256 checksum"):
        load_movielens_100k(cache_dir=tmp_path, report=silent)
    monkeypatch.setattr(
        movielens, "WHEEL_SHA256", hashlib.sha256(world.wheel).hexdigest()
    )
    with pytest.raises(
        DataNotFoundError,
        match="archive does not hold ml-100k.inter",
    ):
        load_movielens_100k(cache_dir=tmp_path, report=silent)


def _said_without_a_source(cache_dir: Path) -> str:
    with pytest.raises(DataNotFoundError) as caught:
        load_movielens_100k(cache_dir=cache_dir, report=silent)
    return str(caught.value)


def test_an_endless_or_slow_answer_of_the_site_is_given_up(
    tmp_path, world, monkeypatch
):
    world.wheel = "ERROR: no wheel"
    with monkeypatch.context() as patch:
        patch.setattr(_sources, "MAX_DOWNLOAD_BYTES", len(OFFICIAL) - 1)
        said = _said_without_a_source(tmp_path)
    assert f"the answer is larger than {len(OFFICIAL) - 1} bytes" in said
    with monkeypatch.context() as patch:
        patch.setattr(_sources, "DOWNLOAD_SECONDS", -1.0)
        said = _said_without_a_source(tmp_path)
    assert "not received in -1 s" in said


def test_an_answer_that_is_no_archive_is_refused(tmp_path, world, monkeypatch):
    world.official = b"a page that asks who you are"
    world.wheel = "ERROR: no wheel"
    monkeypatch.setattr(
        movielens, "OFFICIAL_MD5", hashlib.md5(world.official).hexdigest()
    )
    assert "not a readable zip archive" in _said_without_a_source(tmp_path)


def test_without_a_pip_that_runs_the_wheel_is_no_source(
    tmp_path, world, monkeypatch
):
    world.official = TimeoutError("timed out")

    def fail(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", fail)
        said = _said_without_a_source(tmp_path)
    assert "cannot run pip: [Errno 13] Permission denied" in said
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        patch.setattr(shutil, "which", lambda name: None)
        said = _said_without_a_source(tmp_path)
    assert f"{sys.executable} has no pip, nor has the path" in said


def test_a_folder_whose_files_cannot_be_read_says_so(tmp_path, monkeypatch):
    write(tmp_path, GROUPLENS)

    def fail(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(DataNotFoundError, match=r"cannot read: \[Errno 13\]"):
        load_movielens_100k(tmp_path, report=silent)


def test_a_damaged_cache_is_fetched_again(tmp_path, world):
    write(tmp_path / "ml-100k", GROUPLENS | {"u.user": b"rubbish\n"})
    data = load_movielens_100k(cache_dir=tmp_path, report=silent)
    assert "GroupLens" in data.source
    again = load_movielens_100k(cache_dir=tmp_path, report=silent)
    assert str(tmp_path) in again.source
    assert len(world.asked) == 1


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_cache_write_that_breaks_off_leaves_no_part_of_a_file(
    tmp_path, world, monkeypatch, broken
):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    lines: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, broken, fail)
        data = load_movielens_100k(cache_dir=tmp_path, report=lines.append)
    assert len(data.rating) == 7
    assert "No space left" in lines[-1]
    assert list((tmp_path / "ml-100k").iterdir()) == []


# --- the split


def test_the_split_holds_every_rating_once_and_follows_the_seed(tmp_path):
    data = load(tmp_path, random_fake().grouplens_files())
    total = len(data.rating)
    train, test = data.split(0.1, seed=3)
    assert len(test) == round(total / 10)
    assert sorted([*train, *test]) == list(range(total))
    again = data.split(0.1, seed=3)
    np.testing.assert_array_equal(test, again[1])
    assert not np.array_equal(test, data.split(0.1, seed=4)[1])


@pytest.mark.parametrize(
    "fraction, message",
    [
        (0.0, "test_fraction=0.0"),
        (1.0, "test_fraction=1.0"),
        (0.01, "leaves no rating to test on"),
        (0.99, "leaves no rating to train on"),
    ],
)
def test_a_split_with_an_empty_part_is_refused(tmp_path, fraction, message):
    data = load(tmp_path, GROUPLENS)
    with pytest.raises(ValueError, match=message):
        data.split(fraction)


# --- the features


@pytest.fixture(scope="module")
def random_data(tmp_path_factory) -> MovieLens:
    fake = random_fake(num_users=25, num_items=20, seed=1)
    # User 1 rates item 2 twice more; user 100 has no rating at all.
    fake = dataclasses.replace(
        fake,
        users=(*fake.users, (100, 30, "none")),
        ratings=(*fake.ratings, (1, 2, 2, 5_000), (1, 2, 5, 6_000)),
    )
    folder = tmp_path_factory.mktemp("random")
    return load(folder, fake.recbole_files())


def expected_history(
    data: MovieLens, train: np.ndarray, size: int
) -> Callable[[int, int], list[tuple[int, float]]]:
    """The rule of the history, written down plainly."""
    mean = float(np.mean(data.rating[train], dtype=np.float64))
    popularity = Counter(data.item[train].tolist())
    rated: dict[tuple[int, int], float] = {}
    excess = Counter[int]()
    for row in train:
        user, item = int(data.user[row]), int(data.item[row])
        rated[user, item] = float(data.rating[row])
        excess[item] += float(data.rating[row]) - mean
    item_mean = {
        item: mean + excess[item] / (popularity[item] + SHRINKAGE)
        for item in popularity
    }

    def history(user: int, item: int) -> list[tuple[int, float]]:
        others = [i for (u, i) in rated if u == user and i != item]
        others.sort(key=lambda i: (-popularity[i], i))
        return [(i, rated[user, i] - item_mean[i]) for i in others[:size]]

    return history


@pytest.mark.parametrize("size", [1, 4, 50])
def test_the_history_is_of_the_training_part_without_the_target(
    random_data, size
):
    data = random_data
    train, test = data.split(0.3, seed=0)
    history = expected_history(data, train, size)
    features = RatingFeatures(data, train, history_size=size)
    longest, seen = 0, 0
    for rows in (train, test):
        place = 0
        for inputs, _ in features.dataset(rows, 64):
            ids = inputs["history"].to_list()
            weights = inputs["history_weights"].to_list()
            for bag, weight in zip(ids, weights, strict=True):
                row = rows[place]
                place += 1
                user, item = int(data.user[row]), int(data.item[row])
                expected = history(user, item)
                assert bag == [i for i, _ in expected]
                assert item not in bag
                np.testing.assert_allclose(
                    weight, [w for _, w in expected], atol=1e-5
                )
                longest, seen = max(longest, len(bag)), seen + 1
    assert seen == len(data.rating)
    assert longest == min(size, longest)
    assert longest > 1 or size == 1


def test_no_test_rating_changes_a_feature(random_data):
    data = random_data
    train, test = data.split(0.3, seed=0)
    hidden = data.rating.copy()
    hidden[test] = 1.0
    other = dataclasses.replace(data, rating=hidden)
    batches = [
        next(iter(RatingFeatures(d, train).dataset(test, len(test))))[0]
        for d in (data, other)
    ]
    assert not np.array_equal(hidden, data.rating)
    for name, value in batches[0].items():
        left, right = value, batches[1][name]
        if isinstance(value, tf.RaggedTensor):
            np.testing.assert_array_equal(left.row_splits, right.row_splits)
            left, right = left.values, right.values
        np.testing.assert_array_equal(left, right, err_msg=name)


def test_who_has_no_other_rating_has_an_empty_history(tmp_path):
    data = load(tmp_path, GROUPLENS)
    features = RatingFeatures(data, np.arange(7))
    (inputs, ratings), *rest = features.dataset(np.arange(7), 7)
    assert not rest
    # Users 0 0 0 1 3 4 4; users 1 and 3 rated once.
    assert inputs["history"].to_list() == [
        [1, 2],
        [0, 2],
        [1, 0],
        [],
        [],
        [1],
        [0],
    ]
    assert ratings.numpy().tolist() == [4, 5, 3, 2, 4, 3, 1]


def test_a_batch_holds_the_features_of_its_ratings(tmp_path):
    data = load(tmp_path, GROUPLENS)
    features = RatingFeatures(data, np.arange(7))
    (inputs, ratings), *_ = features.dataset(np.array([6, 0, 4]), 3)
    assert inputs["user"].numpy().tolist() == [4, 0, 3]
    assert inputs["item"].numpy().tolist() == [1, 0, 1]
    assert inputs["age_group"].numpy().tolist() == [6, 0, 5]
    assert inputs["occupation"].numpy().tolist() == [0, 1, 1]
    assert inputs["genres"].to_list() == [[3, 5], [1, 4], [3, 5]]
    # Drama is a genre of two of the four items, the others of one.
    rare, drama = np.log(1 + 4 / 1), np.log(1 + 4 / 2)
    np.testing.assert_allclose(
        inputs["genres_weights"].values,
        [rare, rare, drama, rare, rare, rare],
        rtol=1e-6,
    )
    assert ratings.numpy().tolist() == [1, 4, 4]
    assert ratings.dtype == tf.float32
    dtypes = {name: value.dtype for name, value in inputs.items()}
    assert dtypes == {
        name: tf.float32 if name.endswith("_weights") else tf.int64
        for name in inputs
    }


def test_the_baseline_is_the_shrunk_mean_of_the_training_ratings(tmp_path):
    data = load(tmp_path, GROUPLENS)
    train = np.array([0, 1, 4, 6])  # Item 0: 4. Item 1: 5, 4 and 1.
    features = RatingFeatures(data, train)
    assert features.mean_rating == pytest.approx(3.5)
    np.testing.assert_allclose(
        features.item_mean,
        [
            3.5 + (4 - 3.5) / (1 + SHRINKAGE),
            3.5 + (5 + 4 + 1 - 3 * 3.5) / (3 + SHRINKAGE),
            3.5,
            3.5,
        ],
        rtol=1e-6,
    )


def test_shuffled_batches_repeat_with_the_seed_and_change_by_epoch(
    random_data,
):
    train, _ = random_data.split(0.3)
    features = RatingFeatures(random_data, train)

    def users(batches: tf.data.Dataset) -> list[int]:
        return [int(u) for inputs, _ in batches for u in inputs["user"]]

    plain = users(features.dataset(train, 32))
    one = features.dataset(train, 32, shuffle_seed=5)
    two = features.dataset(train, 32, shuffle_seed=5)
    first_epoch = users(one)
    assert first_epoch == users(two)
    assert users(one) != first_epoch
    assert first_epoch != plain
    assert sorted(first_epoch) == sorted(plain)
    sizes = [len(ratings) for _, ratings in one]
    assert sizes == [32] * (len(train) // 32) + [len(train) % 32]
    assert int(one.cardinality()) == len(sizes)


def test_features_of_nothing_are_refused(random_data):
    with pytest.raises(ValueError, match="no rating to train on"):
        RatingFeatures(random_data, np.array([], np.int64))
    with pytest.raises(ValueError, match="history_size=0"):
        RatingFeatures(random_data, np.arange(5), history_size=0)
