"""What is looked up: one table of ragged bags (A), and 26 features (B).

Only NumPy is used here, so that every contender, of whatever framework, is
fed the same batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

#: Rows of the tables of 26 categorical features, about as in the Criteo data.
CRITEO_ROWS = (
    *(1_000_000, 39_043, 17_289, 7_420, 20_263, 10, 7_120, 1_543, 63),
    *(1_000_000, 800_000, 405_282, 10, 2_209, 11_938, 155, 10, 976, 14),
    *(1_000_000, 900_000, 600_000, 286_181, 10_976, 79, 34),
)
#: Features of B with several ids an example, and those that use the table of
#: another feature.
CRITEO_BAGS = (2, 8, 14, 20)
CRITEO_SHARED = {9: 0, 19: 0, 24: 20}


@dataclasses.dataclass(frozen=True)
class FeatureOf:
    """One feature of a workload.

    Attributes:
        name: Its name.
        table: Index of its table.
        is_bag: Any number of ids an example; else exactly one.
    """

    name: str
    table: int
    is_bag: bool


@dataclasses.dataclass(frozen=True)
class Ids:
    """A feature's ids in one batch: `values[splits[b]:splits[b + 1]]`."""

    values: np.ndarray
    splits: np.ndarray
    weights: np.ndarray | None

    @property
    def bag(self) -> np.ndarray:
        """The example of each id."""
        return np.repeat(np.arange(len(self.splits) - 1), np.diff(self.splits))

    @property
    def column(self) -> np.ndarray:
        """The place of each id within its example."""
        return np.arange(len(self.values)) - self.splits[:-1][self.bag]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Ids of each feature, and the gradient `[F, B, D]` of their outputs."""

    ids: tuple[Ids, ...]
    gradients: np.ndarray


@dataclasses.dataclass(frozen=True)
class Workload:
    """Tables, features, and batches that take turns.

    Attributes:
        tables: Rows of each table.
        dim: Width of all tables.
        features: In the order of their outputs.
        combiner: Of all features.
        batches: Enough that none is in a cache when its turn comes.
    """

    name: str
    tables: tuple[int, ...]
    dim: int
    features: tuple[FeatureOf, ...]
    combiner: str
    batches: tuple[Batch, ...]

    @property
    def batch_size(self) -> int:
        """Examples of a batch."""
        return self.batches[0].gradients.shape[1]

    @property
    def weighted(self) -> bool:
        """Whether ids have weights."""
        return self.batches[0].ids[0].weights is not None

    def initial_values(self) -> list[np.ndarray]:
        """Equal values for the tables of contenders that are compared."""
        random = np.random.default_rng(1)
        return [
            random.uniform(-0.05, 0.05, (rows, self.dim)).astype(np.float32)
            for rows in self.tables
        ]


def single_table(
    rows: int,
    *,
    dim: int = 32,
    combiner: str = "mean",
    weighted: bool = False,
    batch_size: int = 4096,
    mean_length: float = 10,
    num_batches: int = 6,
    used_rows: int | None = None,
    repeats: bool = True,
) -> Workload:
    """Workload A: one feature of bags, some empty, of Zipf-distributed ids.

    Args:
        rows: Rows of the table.
        dim: Its width.
        combiner: `"sum"`, `"mean"` or `"sqrtn"`.
        weighted: Whether ids have weights.
        batch_size: Examples of a batch.
        mean_length: Mean number of ids of an example.
        num_batches: Batches that take turns.
        used_rows: Draw ids as if the table had so many rows.
        repeats: Whether an id may come more than once in a batch.
    """
    random = np.random.default_rng(0)
    batches = []
    for _ in range(num_batches):
        lengths = random.poisson(mean_length, batch_size)
        ids = _ids(random, lengths, used_rows or rows, weighted, repeats)
        batches.append(Batch((ids,), _gradients(random, 1, batch_size, dim)))
    name = f"A rows={rows:.0e} dim={dim} {combiner}"
    return Workload(
        name + (" weighted" if weighted else ""),
        (rows,),
        dim,
        (FeatureOf("item", 0, True),),
        combiner,
        tuple(batches),
    )


def many_tables(
    *,
    dim: int = 16,
    batch_size: int = 8192,
    num_batches: int = 4,
    scale: float = 1.0,
    repeats: bool = True,
) -> Workload:
    """Workload B: 26 features over 23 tables, most with one id an example.

    Args:
        dim: Width of the tables.
        batch_size: Examples of a batch.
        num_batches: Batches that take turns.
        scale: The tables have this many times as many rows.
        repeats: Whether an id may come more than once in a batch; without,
            a table has at least as many rows as the batch needs.
    """
    random = np.random.default_rng(0)
    owners = [f for f in range(26) if f not in CRITEO_SHARED]
    least = 10 if repeats else 8 * batch_size
    rows = tuple(max(least, round(CRITEO_ROWS[f] * scale)) for f in owners)
    features = tuple(
        FeatureOf(
            f"f{f}", owners.index(CRITEO_SHARED.get(f, f)), f in CRITEO_BAGS
        )
        for f in range(26)
    )
    batches = []
    for _ in range(num_batches):
        ids = []
        for feature in features:
            lengths = np.ones(batch_size, np.int64)
            if feature.is_bag:
                lengths = random.poisson(5, batch_size)
            ids.append(
                _ids(random, lengths, rows[feature.table], False, repeats)
            )
        gradients = _gradients(random, len(features), batch_size, dim)
        batches.append(Batch(tuple(ids), gradients))
    if not repeats:
        batches = [_without_repeats(b, features, rows) for b in batches]
    return Workload("B", rows, dim, features, "mean", tuple(batches))


def _without_repeats(
    batch: Batch, features: Sequence[FeatureOf], rows: Sequence[int]
) -> Batch:
    """Features that share a table get ids from parts of it."""
    sharing = [
        [f for f in features if f.table == table] for table in range(len(rows))
    ]
    ids = list(batch.ids)
    for index, feature in enumerate(features):
        group = sharing[feature.table]
        part = rows[feature.table] // len(group)
        if part < len(ids[index].values):
            raise ValueError(f"{feature.name}: not enough rows")
        values = np.arange(len(ids[index].values)) + part * group.index(feature)
        ids[index] = dataclasses.replace(ids[index], values=values)
    return dataclasses.replace(batch, ids=tuple(ids))


def _ids(
    random: np.random.Generator,
    lengths: np.ndarray,
    rows: int,
    weighted: bool,
    repeats: bool,
) -> Ids:
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    count = int(splits[-1])
    if repeats:
        values = zipf_ids(random, count, rows)
    else:
        values = random.permutation(rows)[:count].astype(np.int64)
    weights = None
    if weighted:
        weights = random.uniform(0.5, 1.5, count).astype(np.float32)
    return Ids(values, splits, weights)


def zipf_ids(
    random: np.random.Generator, count: int, rows: int, exponent: float = 1.05
) -> np.ndarray:
    """Ids whose frequency falls as a power of their rank.

    By the inverse of a continuous power law on [1, rows + 1); frequent ids
    are then spread over the table, as hashed ids are.
    """
    power = 1.0 - exponent
    uniform = random.random(count)
    ranks = ((rows + 1.0) ** power * uniform + (1.0 - uniform)) ** (1 / power)
    ranks = np.minimum(ranks.astype(np.int64) - 1, rows - 1)
    factor = 2_654_435_761
    while np.gcd(factor, rows) != 1:
        factor += 2
    return (ranks * factor) % rows


def _gradients(random: np.random.Generator, *shape: int) -> np.ndarray:
    return 0.1 * random.standard_normal(shape, dtype=np.float32)
