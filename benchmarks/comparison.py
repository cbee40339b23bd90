"""Contenders checked against ours, then timed against ours."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import workloads
from benchmarks.contender import Contender
from benchmarks.timing import interleave
from benchmarks.workloads import Workload

Maker = Callable[[Workload], Contender]

#: Outputs and updated rows may differ by so much. Rows hold up to 0.05, and
#: a step moves them by 0.0001 to 0.01.
TOLERANCE = 2e-6


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    warm_up: int = 8
    least_seconds: float = 0.1


def check(
    makers: Mapping[str, Maker], like: Workload, *, training: bool
) -> None:
    """Raises unless all compute what the first does.

    Outputs are compared on ids that repeat; updates on ids that do not, since
    not all sum the gradients of a repeated id first, and on touched rows.

    Args:
        makers: title -> maker; the first one is the reference.
        like: Only its kind matters; small tables are used.
        training: Whether updates are compared too.
    """
    for repeats in (True, False):
        small = _small(like, repeats)
        outputs: dict[str, np.ndarray] = {}
        tables: dict[str, np.ndarray] = {}
        before = small.initial_values()
        for title, make in makers.items():
            contender = make(small)
            # Some make their tables when they see the first batch.
            inputs = contender.inputs_of(small.batches[0])
            contender.set_tables(before)
            outputs[title] = contender.outputs_of(inputs).copy()
            if training and not repeats:
                contender.train(inputs)
                tables[title] = _touched(small, contender.get_tables())
        _compare(outputs, "outputs")
        if training and not repeats:
            moved = next(iter(tables.values())) - _touched(small, before)
            if np.abs(moved).max() < 1e-4:
                raise RuntimeError("The step that was compared moved nothing.")
            _compare(tables, "updated rows")


def _touched(workload: Workload, tables: Sequence[np.ndarray]) -> np.ndarray:
    """The rows that the batch has ids of.

    Of the others, those who take dense steps move some: FTRL starts again
    from 0, whatever the value was.
    """
    (batch,) = workload.batches
    return np.concatenate(
        [
            tables[feature.table][ids.values]
            for feature, ids in zip(workload.features, batch.ids, strict=True)
        ]
    )


def _small(like: Workload, repeats: bool) -> Workload:
    if len(like.tables) > 1:
        return workloads.many_tables(
            dim=like.dim,
            batch_size=64,
            num_batches=1,
            scale=1e-3,
            repeats=repeats,
        )
    return workloads.single_table(
        5_000,
        dim=like.dim,
        combiner=like.combiner,
        weighted=like.weighted,
        batch_size=64,
        num_batches=1,
        repeats=repeats,
    )


def _compare(found: Mapping[str, np.ndarray], what: str) -> None:
    reference, *others = found
    for title in others:
        error = np.abs(found[title] - found[reference]).max()
        if not error < TOLERANCE:
            raise RuntimeError(
                f"{title}: {what} differ from those of {reference} by {error}."
            )


def compare(
    makers: Mapping[str, Maker],
    workload: Workload,
    *,
    training: bool,
    optimizer: str,
    effort: Effort,
    checked: bool = True,
    trained: bool = True,
) -> list[dict[str, Any]]:
    """Times all in one process, against the first.

    Args:
        makers: title -> maker; the first one is ours.
        workload: What to look up.
        training: A training step, or outputs alone.
        optimizer: Of the training step.
        effort: How long to measure.
        checked: Whether to `check` first.
        trained: Of outputs alone: whether each has taken a training step in
            this process, after which TensorFlow copies a variable that is read
            as a whole. Without, a model that was loaded only to be served.

    Returns:
        A record a contender. `ratio` is its time over that of the first:
        above 1, the first is faster.
    """
    if checked:
        check(makers, workload, training=training)
    calls = {}
    for title, make in makers.items():
        contender = make(workload)
        if trained and not training:
            contender.calls(training=True)()
        calls[title] = contender.calls(training=training)
    timings = interleave(
        calls,
        rounds=effort.rounds,
        warm_up=effort.warm_up,
        least_seconds=effort.least_seconds,
    )
    base = next(iter(calls))
    outputs = "forward" if trained else "inference"
    mode = "train" if training else outputs
    records = [
        {
            "workload": workload.name,
            "rows": sum(workload.tables),
            "mode": mode,
            "optimizer": optimizer if training else None,
            "contender": title,
            **timings.figures(title, base),
        }
        for title in calls
    ]
    del calls
    gc.collect()
    return records
