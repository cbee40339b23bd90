"""Files in the two forms of MovieLens-100K, made up here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

GENRES = ("Musical", "Drama", "Sci-Fi", "Horror", "Film-Noir", "Children's")


@dataclasses.dataclass(frozen=True)
class Fake:
    """Raw ids as the files have them.

    `users` are (id, age, occupation), `items` (id, title, year, genres) and
    `ratings` (user, item, rating, timestamp). Year 0 is written as none.
    """

    users: tuple[tuple[int, int, str], ...]
    items: tuple[tuple[int, str, int, tuple[str, ...]], ...]
    ratings: tuple[tuple[int, int, int, int], ...]

    def grouplens_files(self) -> dict[str, bytes]:
        items = []
        for raw_id, title, year, genres in self.items:
            # As published: video films have a mark, one item has no date.
            mark = " (V)" if title.startswith("Video") else ""
            named = f"{title} ({year}){mark}" if year else title
            flags = "|".join(str(int(g in genres)) for g in GENRES)
            date = f"01-Jan-{year}" if year else ""
            items.append(f"{raw_id}|{named}|{date}||http://x/|{flags}\n")
        users = [f"{i}|{age}|F|{job}|T8H1N\n" for i, age, job in self.users]
        genres = [f"{name}|{place}\n" for place, name in enumerate(GENRES)]
        return {
            "u.data": self._ratings().encode(),
            "u.item": "".join(items).encode("latin-1"),
            "u.user": "".join(users).encode(),
            # As published: it ends with a blank line.
            "u.genre": "".join([*genres, "\n"]).encode(),
        }

    def recbole_files(self) -> dict[str, bytes]:
        items = [
            "item_id:token\tmovie_title:token_seq\t"
            "release_year:token\tclass:token_seq\n"
        ]
        for raw_id, title, year, genres in self.items:
            # As published: what stands for the year of a video film is "V".
            if title.startswith("Video"):
                title, shown = f"{title} ({year})", "V"
            else:
                shown = str(year or "unknown")
            names = " ".join(g for g in GENRES if g in genres)
            items.append(f"{raw_id}\t{title}\t{shown}\t{names}\n")
        users = ["user_id:token\tage:token\tgender:token\toccupation:token\n"]
        users += [f"{i}\t{age}\tF\t{job}\n" for i, age, job in self.users]
        header = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
        return {
            "ml-100k.inter": (header + self._ratings()).encode(),
            "ml-100k.item": "".join(items).encode("utf-8"),
            "ml-100k.user": "".join(users).encode(),
        }

    def _ratings(self) -> str:
        return "".join("\t".join(map(str, r)) + "\n" for r in self.ratings)


# Raw ids have gaps, user 5 rated once, user 3 and item 40 not at all.
SMALL = Fake(
    users=(
        (9, 56, "none"),
        (1, 17, "student"),
        (2, 18, "writer"),
        (3, 49, "writer"),
        (5, 55, "student"),
    ),
    items=(
        (20, "Alien (the first)", 1979, ("Sci-Fi", "Horror")),
        (10, "Misérables, Les", 1995, ("Musical", "Drama")),
        (30, "unknown", 0, ("Film-Noir",)),
        (40, "Video Toys", 1999, ("Drama", "Children's")),
    ),
    ratings=(
        (9, 10, 3, 700),
        (1, 20, 5, 900),
        (1, 10, 4, 800),
        (2, 30, 2, 650),
        (9, 20, 1, 710),
        (1, 30, 3, 900),
        (5, 20, 4, 100),
    ),
)


def random_fake(
    num_users: int = 40, num_items: int = 30, seed: int = 0
) -> Fake:
    """People of two tastes and items of two kinds: the match is the rating."""
    random = np.random.default_rng(seed)
    jobs = ("student", "writer", "none")
    ratings = [
        (
            user,
            item,
            int(random.integers(4, 6) if user % 2 == item % 2 else 1),
            int(random.integers(1_000)),
        )
        for user in range(1, num_users + 1)
        for item in range(1, num_items + 1)
        if random.random() < 0.5
    ]
    return Fake(
        tuple(
            (user, int(random.integers(10, 80)), jobs[user % len(jobs)])
            for user in range(1, num_users + 1)
        ),
        tuple(
            (
                item,
                f"Film {item}",
                1990,
                tuple(random.choice(GENRES, random.integers(1, 4), False)),
            )
            for item in range(1, num_items + 1)
        ),
        tuple(ratings),
    )


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
