"""Records as text, and as the figures of the targets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.targets import TARGETS

Record = Mapping[str, Any]


def lines(records: Iterable[Record]) -> Iterator[str]:
    """A table for each experiment."""

    def experiment(record: Record) -> tuple[Any, ...]:
        keys = ("group", "workload", "mode", "optimizer")
        return tuple(record.get(key) for key in keys)

    for key, group in itertools.groupby(records, experiment):
        yield ""
        yield "  ".join(str(part) for part in key if part is not None)
        for record in group:
            yield "  " + _line(record)


def _line(record: Record) -> str:
    if "ratio" not in record:
        skipped = ("group", "workload", "contender")
        fields = {k: v for k, v in record.items() if k not in skipped}
        return f"{record.get('contender', ''):34s} {fields}"
    spread = f"[{record['low']:.2f} to {record['high']:.2f}]"
    size = f"{record['rows']:,} rows" if "rows" in record else ""
    return (
        f"{record['contender']:34s} {record['ratio']:8.2f}x  {spread:20s} "
        f"{record['milliseconds']:10.2f} ms  {size}"
    )


def figures(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Key of each target that was measured -> its figure, and if it is met."""
    found = {}
    for target in TARGETS:
        record = target.find(records)
        if record is not None:
            bound = target.at_least if target.below is None else target.below
            found[target.key] = {
                "ratio": record["ratio"],
                "low": record["low"],
                "high": record["high"],
                "at_least" if target.below is None else "below": bound,
                "met": target.is_met(record["ratio"]),
            }
    return found


def target_lines(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line a target."""
    for key, figure in found.items():
        bound = (
            f"at least {figure['at_least']}"
            if "at_least" in figure
            else f"below {figure['below']}"
        )
        mark = "met" if figure["met"] else "MISSED"
        yield f"{key:36s} {figure['ratio']:8.2f}  {bound:16s} {mark}"
