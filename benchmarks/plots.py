"""Plots of what was measured: step time against rows, and ratios as bars."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt

Record = Mapping[str, Any]

# A script run again gives the same files.
plt.rcParams.update(
    {
        "svg.hashsalt": "tf_distembed",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.3,
    }
)


def step_time(records: Sequence[Record], path: pathlib.Path) -> None:
    """Time of a step on the same ids; ours in the smallest table is 1."""
    found = [r for r in records if r["workload"] == "same 5,000 ids"]
    if not found:
        return
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for title in dict.fromkeys(r["contender"] for r in found):
        own = [r for r in found if r["contender"] == title]
        axes.plot(
            [r["rows"] for r in own],
            [r["ratio"] for r in own],
            marker="o",
            label=title,
        )
        axes.fill_between(
            [r["rows"] for r in own],
            [r["low"] for r in own],
            [r["high"] for r in own],
            alpha=0.2,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="rows of the table",
        ylabel="time of a step (ours, 10,000 rows = 1)",
        title="Training with Adagrad on the same 5,000 ids",
    )
    axes.legend()
    _save(figure, path)


def ratios(records: Sequence[Record], path: pathlib.Path) -> None:
    """How many times as long as ours each other takes."""
    bars = [
        record
        for record in records
        if record.get("mode") == "train"
        and record.get("optimizer") == "adagrad"
        and record.get("rows") is not None
        and (
            record["workload"] == "A rows=1e+06 dim=32 mean"
            or record["workload"] == "B"
        )
        and record["contender"] not in ("tf_distembed", "raw operations")
        and not record["group"].endswith("huge-pages")
    ]
    if not bars:
        return
    bars.sort(key=lambda r: (r["workload"], r["ratio"]))
    figure, axes = plt.subplots(figsize=(6.5, 0.4 * len(bars) + 1))
    places = range(len(bars))
    axes.barh(
        places,
        [r["ratio"] for r in bars],
        xerr=[
            [r["ratio"] - r["low"] for r in bars],
            [r["high"] - r["ratio"] for r in bars],
        ],
        color=["C0" if r["workload"] == "B" else "C1" for r in bars],
    )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(
        places,
        [
            f"{'B' if r['workload'] == 'B' else 'A'}  {r['contender']}"
            for r in bars
        ],
    )
    axes.set(
        xscale="log",
        xlabel="time of a training step over ours",
        title="Adagrad. A: one table of 10⁶ rows; B: 26 features, 23 tables",
    )
    _save(figure, path)


def _save(figure: Any, path: pathlib.Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(source: str, directory: str) -> None:
    records = json.loads(pathlib.Path(source).read_text())["records"]
    to = pathlib.Path(directory)
    to.mkdir(parents=True, exist_ok=True)
    step_time(records, to / "step_time.svg")
    ratios(records, to / "ratios.svg")


if __name__ == "__main__":
    main(*sys.argv[1:])
