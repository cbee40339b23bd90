"""Writes the figures of a run into docs/performance.md.

    python -m benchmarks.page docs/performance/results.json docs/performance.md

What stands between `<!-- NAME -->` and `<!-- end -->` is replaced.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.targets import TARGETS

Record = Mapping[str, Any]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _ratio(record: Record) -> str:
    return (
        f"{record['ratio']:.2f} ({record['low']:.2f} to {record['high']:.2f})"
    )


def targets(records: Sequence[Record]) -> str:
    """Every target with its figure."""

    def rows() -> Iterator[list[str]]:
        for target in TARGETS:
            record = target.find(records)
            bound = (
                f"at least {target.at_least}"
                if target.below is None
                else f"below {target.below}"
            )
            if record is None:
                yield [f"`{target.key}`", bound, "not measured", ""]
            else:
                met = "yes" if target.is_met(record["ratio"]) else "**no**"
                yield [f"`{target.key}`", bound, _ratio(record), met]

    return _table(["key", "bound", "measured", "reached"], rows())


def single(records: Sequence[Record]) -> str:
    """A, training: one row a contender and size, one column an optimizer."""
    return _by_optimizer(records, "A rows=")


def many(records: Sequence[Record]) -> str:
    """B."""
    rows = [
        [r["mode"], r["contender"], _ratio(r)]
        for r in records
        if r["workload"] == "B"
        and r["group"] in ("tf-B", "torch-B", "floor")
        and r["contender"] != "tf_distembed"
    ]
    return _table(["", "against", "their time over ours"], rows)


def _by_optimizer(records: Sequence[Record], prefix: str) -> str:
    columns = ("sgd", "adagrad", "adam", "ftrl", "forward", "inference")
    found: dict[tuple[int, str], dict[str, str]] = {}
    for r in records:
        plain = r["workload"].endswith("dim=32 mean")
        if not plain or not r["workload"].startswith(prefix):
            continue
        if r["contender"] == "tf_distembed" or "huge" in r["group"]:
            continue
        column = r["optimizer"] if r["mode"] == "train" else r["mode"]
        key = (r["rows"], r["contender"])
        found.setdefault(key, {})[column] = f"{r['ratio']:.1f}"
    rows = [
        [f"{size:,}", contender, *(cells.get(c, "") for c in columns)]
        for (size, contender), cells in sorted(found.items())
    ]
    return _table(["rows", "against", *columns], rows)


def others(records: Sequence[Record]) -> str:
    """Other combiners, weights and widths; TFRS."""
    rows = [
        [r["workload"], r["mode"], r["contender"], _ratio(r)]
        for r in records
        if (
            r["group"] in ("tf-A-variants", "tfrs")
            or "weighted" in r["workload"]
        )
        and r["contender"] != "tf_distembed"
    ]
    return _table(["workload", "", "against", "their time over ours"], rows)


def _plain(records: Sequence[Record], *groups: str) -> str:
    rows = [
        [
            r["workload"],
            f"{r['rows']:,}" if "rows" in r else "",
            r["contender"],
            _ratio(r),
        ]
        for r in records
        if r["group"] in groups and "ratio" in r
    ]
    return _table(["", "rows", "", "ratio"], rows)


def own(records: Sequence[Record]) -> str:
    """Public calls and the input pipeline."""
    return _plain(records, "public-calls", "input")


def ids(records: Sequence[Record]) -> str:
    """The same ids in tables of many sizes."""
    return _plain(records, "same-ids")


def settings(records: Sequence[Record]) -> str:
    """Environment variables, and huge pages."""
    return _plain(records, "settings", "huge-pages")


def memory(records: Sequence[Record]) -> str:
    """Peak memory, and traces."""
    rows = [
        [r["contender"], f"{r['peak_per_state']:.2f}"]
        for r in records
        if r["group"] == "memory"
    ]
    return _table(["", "peak over the bytes of table and slots"], rows)


SECTIONS = {
    one.__name__: one
    for one in (targets, single, many, others, own, ids, settings, memory)
}


def write(source: pathlib.Path, page: pathlib.Path) -> None:
    records = json.loads(source.read_text())["records"]
    text = page.read_text()
    for name, make in SECTIONS.items():
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(\n<!-- end -->)",
            lambda match, make=make: (
                match.group(1) + "\n" + make(records) + "\n" + match.group(2)
            ),
            text,
            flags=re.DOTALL,
        )
        if count != 1:
            raise ValueError(f"{page} has no place for {name}.")
    page.write_text(text)


if __name__ == "__main__":
    write(*map(pathlib.Path, sys.argv[1:]))
