"""What each group of the suite measures, in a process of its own.

An experiment yields records: dicts that `report.py` and `plots.py` read.
Frameworks are imported where they are used, since no environment has all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from benchmarks import workloads
from benchmarks.comparison import Effort, Maker, compare
from benchmarks.workloads import Workload

Record = dict[str, Any]
OPTIMIZERS = ("sgd", "adagrad", "adam", "ftrl")


def _ours(optimizer: str) -> dict[str, Maker]:
    from benchmarks.tf_contenders import Ours

    return {Ours.title: functools.partial(Ours, optimizer=optimizer)}


def _of(contenders: Any, optimizer: str) -> dict[str, Maker]:
    return {
        one.title: functools.partial(one, optimizer=optimizer)
        for one in contenders
    }


#: Tables of more rows leave memory for fewer contenders.
_MANY_ROWS = 10**6


def _keras(
    optimizer: str, *, rows: int = 0, training: bool = True, raw: bool = False
) -> dict[str, Maker]:
    from benchmarks import keras_contenders as peers
    from benchmarks.raw_operations import RawOperations

    contenders: list[Any] = [peers.KerasRs]
    if not training or rows <= _MANY_ROWS:
        contenders.append(peers.LookupSparse)
    if rows <= _MANY_ROWS:
        contenders.append(peers.KerasEmbedding)
        if raw:
            contenders.append(RawOperations)
    return {**_ours(optimizer), **_of(contenders, optimizer)}


def tensorflow_single(
    rows: int, effort: Effort, *, quick: bool
) -> Iterator[Record]:
    """A at one size: all optimizers, outputs, weights."""
    workload = workloads.single_table(rows)
    optimizers = ("adagrad",) if quick else OPTIMIZERS
    if rows > _MANY_ROWS:
        # A dense step takes seconds, and with FTRL more than 24 GiB.
        effort = dataclasses.replace(effort, rounds=7, warm_up=2)
        optimizers = tuple(one for one in optimizers if one != "ftrl")
    for optimizer in optimizers:
        yield from compare(
            _keras(optimizer, rows=rows, raw=True),
            workload,
            training=True,
            optimizer=optimizer,
            effort=effort,
        )
    yield from _outputs(workload, effort)
    if quick:
        return
    yield from compare(
        _keras("adagrad", rows=rows),
        workloads.single_table(rows, weighted=True),
        training=True,
        optimizer="adagrad",
        effort=effort,
    )


def _outputs(workload: Workload, effort: Effort) -> Iterator[Record]:
    """The outputs alone, of tables in training and of tables to be served."""
    makers = _keras("sgd", rows=max(workload.tables), training=False, raw=True)
    for trained in (True, False):
        yield from compare(
            makers,
            workload,
            training=False,
            optimizer="sgd",
            effort=effort,
            trained=trained,
        )


def tensorflow_variants(effort: Effort) -> Iterator[Record]:
    """A at 10^6 rows: the other combiners, and wider rows."""
    for settings in (
        {"combiner": "sum"},
        {"combiner": "sqrtn"},
        {"combiner": "sqrtn", "weighted": True},
        {"dim": 128},
    ):
        workload = workloads.single_table(10**6, **settings)  # type: ignore[arg-type]
        for training in (True, False):
            yield from compare(
                _keras("adagrad"),
                workload,
                training=training,
                optimizer="adagrad",
                effort=effort,
            )


def tensorflow_many(effort: Effort) -> Iterator[Record]:
    """B against Keras' and TensorFlow's ways."""
    workload = workloads.many_tables()
    yield from compare(
        _keras("adagrad", raw=True),
        workload,
        training=True,
        optimizer="adagrad",
        effort=effort,
    )
    yield from _outputs(workload, effort)


def _torch(optimizer: str) -> dict[str, Maker]:
    from benchmarks import torch_contenders as peers

    contenders: list[Any] = []
    if optimizer != "ftrl":
        contenders.append(peers.EmbeddingBags)
    if optimizer in ("sgd", "adagrad"):
        contenders.append(peers.Fbgemm)
    return {**_ours(optimizer), **_of(contenders, optimizer)}


def torch_single(rows: int, effort: Effort, *, quick: bool) -> Iterator[Record]:
    """A against torch and FBGEMM."""
    optimizers = ("adagrad",) if quick else ("sgd", "adagrad", "adam")
    yield from _against_torch(workloads.single_table(rows), optimizers, effort)


def torch_many(effort: Effort) -> Iterator[Record]:
    """B against torch and FBGEMM."""
    yield from _against_torch(workloads.many_tables(), ("adagrad",), effort)


def _against_torch(
    workload: Workload, optimizers: tuple[str, ...], effort: Effort
) -> Iterator[Record]:
    for optimizer in optimizers:
        yield from compare(
            _torch(optimizer),
            workload,
            training=True,
            optimizer=optimizer,
            effort=effort,
        )
    yield from compare(
        _torch("adagrad"),
        workload,
        training=False,
        optimizer="adagrad",
        effort=effort,
    )


def recommenders(rows: int, effort: Effort) -> Iterator[Record]:
    """A against TensorFlow Recommenders, which needs the older Keras."""
    from benchmarks.tfrs_contender import Recommenders

    workload = workloads.single_table(rows)
    for optimizer in ("adagrad", "adam"):
        yield from compare(
            {**_ours(optimizer), **_of([Recommenders], optimizer)},
            workload,
            training=True,
            optimizer=optimizer,
            effort=effort,
        )


def floor(effort: Effort) -> Iterator[Record]:
    """A and B against the C floor, forward and training."""
    from benchmarks.floor import Floor

    for workload in (workloads.single_table(10**6), workloads.many_tables()):
        for training in (True, False):
            yield from compare(
                {**_ours("adagrad"), Floor.title: Floor},
                workload,
                training=training,
                optimizer="adagrad",
                effort=effort,
            )
