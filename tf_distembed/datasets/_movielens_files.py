"""The two forms in which MovieLens-100K is published, parsed to one.

    GroupLens: u.data, u.item, u.user, u.genre     tab or "|", Latin-1
    RecBole: ml-100k.inter, .item, .user           tab, UTF-8, a typed header

Both end as `Tables` of raw ids and names. A file that does not parse is a
ValueError that begins with its name and the number of the line.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Iterator, Sequence

import numpy as np

from tf_distembed.datasets._sources import Files

GROUPLENS = ("u.data", "u.item", "u.user", "u.genre")
RECBOLE = ("ml-100k.inter", "ml-100k.item", "ml-100k.user")

# u.item has five columns before one 0/1 column for each genre.
_COLUMNS_BEFORE_GENRES = 5

# "Postino, Il (1994)"; "(V)" marks a film that was made for video.
_TITLE_AND_YEAR = re.compile(r"(.*?)\s*\((\d{4})\)\s*(?:\(V\))?\s*")


@dataclasses.dataclass(frozen=True)
class User:
    """One line about a user."""

    raw_id: int
    age: int
    occupation: str


@dataclasses.dataclass(frozen=True)
class Item:
    """One line about an item; `year` is 0 where the file names none."""

    raw_id: int
    title: str
    year: int
    genres: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
    """What the files say, in their own ids.

    `ratings` is float64 `[N, 4]`: user, item, rating, timestamp.
    """

    ratings: np.ndarray
    users: list[User]
    items: list[Item]


def parse(files: Files) -> Tables:
    """Parses whichever of the two forms `files` is."""
    if set(GROUPLENS) <= set(files):
        return _parse_grouplens(files)
    return _parse_recbole(files)


def _parse_grouplens(files: Files) -> Tables:
    # One line a genre, "Action|1"; the number is the place of its flag.
    numbered = {
        _integer(where, fields[1]): fields[0]
        for where, fields in _lines(files, "u.genre", "|", "latin-1", 2)
    }
    genres = [numbered[place] for place in sorted(numbered)]
    width = _COLUMNS_BEFORE_GENRES + len(genres)
    items = []
    for where, fields in _lines(files, "u.item", "|", "latin-1", width):
        flags = fields[_COLUMNS_BEFORE_GENRES:]
        if not set(flags) <= {"0", "1"}:
            raise ValueError(f"{where}: a genre's flag is neither 0 nor 1")
        title, year = _title_and_year(fields[1])
        chosen = [
            g for g, flag in zip(genres, flags, strict=True) if flag > "0"
        ]
        items.append(
            Item(_integer(where, fields[0]), title, year, tuple(chosen))
        )
    return Tables(
        _numbers(files, "u.data", range(4), header_lines=0),
        [
            User(_integer(where, f[0]), _integer(where, f[1]), f[3])
            for where, f in _lines(files, "u.user", "|", "latin-1", 5)
        ],
        items,
    )


def _parse_recbole(files: Files) -> Tables:
    ratings, items, users = RECBOLE
    columns = _columns(
        files, ratings, "user_id", "item_id", "rating", "timestamp"
    )
    return Tables(
        _numbers(files, ratings, columns, header_lines=1),
        [
            User(_integer(where, raw_id), _integer(where, age), occupation)
            for where, (raw_id, age, occupation) in _records(
                files, users, "user_id", "age", "occupation"
            )
        ],
        [
            Item(
                _integer(where, raw_id),
                *_title_and_year(title, year),
                tuple(genres.split()),
            )
            for where, (raw_id, title, year, genres) in _records(
                files, items, "item_id", "movie_title", "release_year", "class"
            )
        ],
    )


def _title_and_year(title: str, year: str = "") -> tuple[str, int]:
    """Splits "Title (1995)"; a year of its own column comes first."""
    if re.fullmatch(r"\d{4}", year):
        return title, int(year)
    if match := _TITLE_AND_YEAR.fullmatch(title):
        return match[1], int(match[2])
    return title, 0


def _lines(
    files: Files, name: str, separator: str, encoding: str, width: int
) -> Iterator[tuple[str, list[str]]]:
    """Each line that is not blank as (where it stands, its fields)."""
    try:
        text = files[name].decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: {error}") from error
    # Not splitlines(): titles may hold one of Unicode's other line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line:
            continue
        fields = line.split(separator)
        where = f"{name}, line {number}"
        if len(fields) != width:
            raise ValueError(
                f"{where}: {width} fields expected, {len(fields)} found"
            )
        yield where, fields


def _header(files: Files, name: str) -> list[str]:
    """The column names of a RecBole file: `user_id:token` is `user_id`."""
    first = files[name].split(b"\n", 1)[0].decode("utf-8", "replace")
    return [column.split(":")[0].strip() for column in first.split("\t")]


def _columns(files: Files, name: str, *wanted: str) -> list[int]:
    header = _header(files, name)
    if missing := [column for column in wanted if column not in header]:
        raise ValueError(
            f"{name}, line 1: no column {', '.join(missing)}; "
            f"its columns are {', '.join(header)}"
        )
    return [header.index(column) for column in wanted]


def _records(
    files: Files, name: str, *wanted: str
) -> Iterator[tuple[str, list[str]]]:
    """The wanted columns of each line of a RecBole file but its header."""
    columns = _columns(files, name, *wanted)
    lines = _lines(files, name, "\t", "utf-8", len(_header(files, name)))
    next(lines)
    for where, fields in lines:
        yield where, [fields[column] for column in columns]


def _numbers(
    files: Files, name: str, columns: Sequence[int], *, header_lines: int
) -> np.ndarray:
    """Columns of numbers as float64 `[lines, len(columns)]`."""
    body = files[name].split(b"\n", header_lines)[header_lines:]
    if not body or not body[0].strip():
        return np.zeros((0, len(columns)))
    try:
        return np.loadtxt(
            io.BytesIO(files[name]),
            delimiter="\t",
            skiprows=header_lines,
            usecols=columns,
            ndmin=2,
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _integer(where: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{where}: a whole number expected, {text!r} found"
        ) from None
