"""What the suite is to show, and which record shows it.

A ratio is another's time over ours: above 1, ours takes less. Of the C floor
it is the part of the floor's speed that ours reaches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

KERAS_RS, LOOKUP_SPARSE = "keras-rs", "tf.nn.embedding_lookup_sparse"
FBGEMM, TORCH = "FBGEMM TBE", "torch EmbeddingBag"
FLOOR, RAW, OURS = "C floor", "raw operations", "tf_distembed"


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound on the ratio of one record.

    Attributes:
        key: Its name in the last line.
        at_least: The bound; None if it is one from above.
        below: The bound from above, or None.
        group: The group that measures it.
        where: What the record's fields must be.
    """

    key: str
    at_least: float | None
    group: str
    where: Mapping[str, Any]
    below: float | None = None

    def find(self, records: Iterable[Mapping[str, Any]]) -> Any:
        """The record, or None if it was not measured."""
        wanted = {"group": self.group, **self.where}
        for record in records:
            if all(record.get(k) == v for k, v in wanted.items()):
                return record
        return None

    def is_met(self, ratio: float) -> bool:
        """Whether a ratio reaches it."""
        if self.at_least is not None:
            return ratio >= self.at_least
        assert self.below is not None
        return ratio < self.below


def _a(rows: str, **where: Any) -> dict[str, Any]:
    return {"workload": f"A rows={rows} dim=32 mean", **where}


def _train(optimizer: str, contender: str) -> dict[str, Any]:
    return {"mode": "train", "optimizer": optimizer, "contender": contender}


def _forward(contender: str) -> dict[str, Any]:
    return {"mode": "forward", "contender": contender}


def _targets() -> list[Target]:
    found = []
    million, ten_million = "1e+06", "1e+07"
    for rows, name, bounds in (
        (million, "1e6", {"adagrad": 10, "adam": 10, "ftrl": 15}),
        (ten_million, "1e7", {"adagrad": 15, "adam": 20}),
    ):
        for optimizer, bound in bounds.items():
            where = _a(rows, **_train(optimizer, KERAS_RS))
            found.append(
                Target(
                    f"keras_rs_{optimizer}_{name}",
                    bound,
                    f"tf-A-{name}",
                    where,
                )
            )
    for power in (4, 5, 6, 7):
        rows, name = f"1e+{power:02d}", f"1e{power}"
        group = f"tf-A-{name}"
        for key, bound, where in (
            (f"keras_rs_sgd_{name}", 4, _train("sgd", KERAS_RS)),
            (f"keras_rs_forward_{name}", 2.5, _forward(KERAS_RS)),
            (f"lookup_sparse_forward_{name}", 1.3, _forward(LOOKUP_SPARSE)),
        ):
            found.append(Target(key, bound, group, _a(rows, **where)))
        weighted = {
            "workload": f"A rows={rows} dim=32 mean weighted",
            **_train("adagrad", KERAS_RS),
        }
        found.append(
            Target(f"keras_rs_weighted_adagrad_{name}", 8, group, weighted)
        )
    for key, bound, contender in (
        ("fbgemm_adagrad_1e6", 1, FBGEMM),
        ("torch_adagrad_1e6", 2, TORCH),
    ):
        where = _a(million, **_train("adagrad", contender))
        found.append(Target(key, bound, "torch-A-1e6", where))
    many = {"workload": "B"}
    for key, bound, group, where in (
        ("keras_rs_adagrad_B", 5, "tf-B", _train("adagrad", KERAS_RS)),
        ("fbgemm_adagrad_B", 1.5, "torch-B", _train("adagrad", FBGEMM)),
        ("torch_adagrad_B", 2.5, "torch-B", _train("adagrad", TORCH)),
        ("keras_rs_forward_B", 4, "tf-B", _forward(KERAS_RS)),
        ("fbgemm_forward_B", 1, "torch-B", _forward(FBGEMM)),
    ):
        found.append(Target(key, bound, group, {**many, **where}))
    for pages, group in (("", "floor"), ("_huge_pages", "floor-huge-pages")):
        where = _train("adagrad", FLOOR)
        found += [
            Target(
                f"floor_adagrad_1e6{pages}", 0.35, group, _a(million, **where)
            ),
            Target(f"floor_adagrad_B{pages}", 0.35, group, {**many, **where}),
        ]
    for name, rows in (("1e6", 10**6), ("1e7", 10**7)):
        where = {"workload": "same 5,000 ids", "rows": rows, "contender": OURS}
        found.append(
            Target(f"same_ids_{name}_over_1e4", None, "same-ids", where, 1.5)
        )
    found += [
        Target(
            "raw_operations_adagrad_1e6",
            round(1 / 1.15, 3),
            "tf-A-1e6",
            _a(million, **_train("adagrad", RAW)),
        ),
        Target(
            "raw_operations_adagrad_B",
            round(1 / 1.15, 3),
            "tf-B",
            {**many, **_train("adagrad", RAW)},
        ),
    ]
    return found


TARGETS = _targets()
