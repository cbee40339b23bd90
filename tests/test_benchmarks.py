"""The parts of the benchmarks that need no framework."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks import page, report, targets, workloads
from benchmarks.timing import Timings, interleave

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "performance.md"


def test_a_ratio_is_of_times_of_one_round() -> None:
    # The machine is ten times slower in the last round, for both.
    timings = Timings({"ours": [1.0, 1.0, 10.0], "other": [3.0, 2.0, 40.0]})
    ratio = timings.ratio("other", "ours")
    assert (ratio.median, ratio.low, ratio.high) == (3.0, 2.5, 3.5)


def test_every_call_is_timed_once_a_round_in_changing_order() -> None:
    order: list[str] = []

    def call(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    timings = interleave(
        {"a": call("a"), "b": call("b")},
        rounds=20,
        warm_up=2,
        least_seconds=0,
    )
    # Two calls to warm up and one to count repetitions, each.
    rounds = order[6:]
    pairs = list(zip(rounds[::2], rounds[1::2], strict=True))
    assert set(pairs) == {("a", "b"), ("b", "a")}
    assert {len(seconds) for seconds in timings.seconds.values()} == {20}


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda repeats: workloads.single_table(
            2_000, batch_size=50, repeats=repeats, weighted=True
        ),
        lambda repeats: workloads.many_tables(
            batch_size=50, scale=1e-3, repeats=repeats
        ),
    ],
    ids=["A", "B"],
)
def test_ids_are_within_their_tables(make: Callable, repeats: bool) -> None:
    workload = make(repeats)
    for batch in workload.batches:
        used: dict[int, list[int]] = {}
        for feature, ids in zip(workload.features, batch.ids, strict=True):
            assert ids.values.min() >= 0
            assert ids.values.max() < workload.tables[feature.table]
            assert ids.splits[-1] == len(ids.values)
            if not feature.is_bag:
                assert np.all(np.diff(ids.splits) == 1)
            used.setdefault(feature.table, []).extend(ids.values)
        repeated = [len(own) != len(set(own)) for own in used.values()]
        assert any(repeated) == repeats
        assert batch.gradients.shape == (
            len(workload.features),
            50,
            workload.dim,
        )


def _record(target: targets.Target, ratio: float) -> dict[str, object]:
    spread = {"ratio": ratio, "low": ratio, "high": ratio}
    return {"group": target.group, "rows": 1, **target.where, **spread}


def test_each_target_finds_its_own_record() -> None:
    records = [
        _record(target, float(place))
        for place, target in enumerate(targets.TARGETS)
    ]
    found = report.figures(records)
    assert [figure["ratio"] for figure in found.values()] == list(
        range(len(targets.TARGETS))
    )
    assert len(found) == len(targets.TARGETS)


def test_a_target_is_met_from_the_side_it_names() -> None:
    by_key = {target.key: target for target in targets.TARGETS}
    assert by_key["keras_rs_adagrad_1e6"].is_met(10)
    assert not by_key["keras_rs_adagrad_1e6"].is_met(9.9)
    assert by_key["same_ids_1e7_over_1e4"].is_met(1.4)
    assert not by_key["same_ids_1e7_over_1e4"].is_met(1.5)


def test_the_page_takes_the_figures(tmp_path: pathlib.Path) -> None:
    record = {**_record(targets.TARGETS[0], 12.5), "milliseconds": 1.0}
    source, written = tmp_path / "results.json", tmp_path / "page.md"
    source.write_text(json.dumps({"records": [record]}))
    written.write_text(PAGE.read_text())
    page.write(source, written)
    assert "12.50" in written.read_text()
    assert "not measured" in written.read_text()
