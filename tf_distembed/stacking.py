"""Which tables are looked up together.

The tables of a stack have one width, dtype and placement, and equal
optimizers. A stack addresses its rows by one range of ids: the rows of its
first table, then those of its second, and so on. Looking up a stack at once
costs a few operations, whatever the number of its tables; it never changes a
result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tf_distembed.config import TableConfig
from tf_distembed.features import Feature


@dataclasses.dataclass(frozen=True)
class Stack:
    """Tables that are looked up together, and the features that use them.

    Attributes:
        tables: In the order of their rows.
        features: In the order of their tables, so that the ids of a batch
            come grouped by table.
        offsets: The first row of each table within the stack.
    """

    tables: tuple[TableConfig, ...]
    features: tuple[Feature, ...]
    offsets: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return self.offsets[-1] + self.tables[-1].vocabulary_size


def make_stacks(
    tables: Sequence[TableConfig],
    features: Sequence[Feature],
    table_stacking: Any,
    keys: dict[str, Any],
) -> list[Stack]:
    """Groups the tables of one placement.

    Args:
        tables: The tables, in order of configuration.
        features: Their features.
        table_stacking: `"auto"`, None, or lists of table names.
        keys: table name -> what must be equal within a stack: a dict
            {property: value}.

    Raises:
        TypeError: `table_stacking` of another form.
        ValueError: tables listed together that cannot be.
    """
    groups = _groups(tables, table_stacking, keys)
    return [_stack(group, features) for group in groups]


def check_stacking(table_stacking: Any, names: Sequence[str]) -> None:
    """Raises unless `table_stacking` is of a known form over these tables."""
    if table_stacking is None or table_stacking == "auto":
        return
    lists = _as_lists(table_stacking)
    seen: set[str] = set()
    for name in (name for group in lists for name in group):
        if name not in names:
            raise ValueError(
                f"table_stacking names table '{name}', which does not exist. "
                f"The tables are {sorted(names)}."
            )
        if name in seen:
            raise ValueError(f"table_stacking names table '{name}' twice.")
        seen.add(name)


def _as_lists(table_stacking: Any) -> list[list[str]]:
    if isinstance(table_stacking, (list, tuple)):
        if all(isinstance(name, str) for name in table_stacking):
            return [list(table_stacking)]
        if all(
            isinstance(group, (list, tuple))
            and all(isinstance(name, str) for name in group)
            for group in table_stacking
        ):
            return [list(group) for group in table_stacking]
    if isinstance(table_stacking, str):
        raise ValueError(
            "table_stacking must be 'auto', None, or lists of table names. "
            f"Received: {table_stacking!r}"
        )
    raise TypeError(
        "table_stacking must be 'auto', None, or lists of table names. "
        f"Received: {table_stacking!r} (of type "
        f"{type(table_stacking).__name__})"
    )


def _groups(
    tables: Sequence[TableConfig], table_stacking: Any, keys: dict[str, Any]
) -> list[list[TableConfig]]:
    if table_stacking is None:
        return [[table] for table in tables]
    if table_stacking == "auto":
        alike: dict[Any, list[TableConfig]] = {}
        for table in tables:
            key = tuple(keys[table.name].values())
            alike.setdefault(key, []).append(table)
        return list(alike.values())
    by_name = {table.name: table for table in tables}
    groups = []
    for names in _as_lists(table_stacking):
        group = [by_name.pop(name) for name in names if name in by_name]
        if not group:
            continue
        if len(group) < len(names):
            here = {table.name for table in group}
            raise ValueError(
                f"table_stacking lists {names} together, but only "
                f"{sorted(here)} of them are placed alike."
            )
        for table in group[1:]:
            _check_alike(group[0], table, keys)
        groups.append(group)
    return groups + [[table] for table in by_name.values()]


def _check_alike(
    first: TableConfig, table: TableConfig, keys: dict[str, Any]
) -> None:
    ours, theirs = keys[first.name], keys[table.name]
    differ = [key for key in ours if ours[key] != theirs[key]]
    if differ:
        raise ValueError(
            f"table_stacking lists '{first.name}' and '{table.name}' together,"
            f" but they differ in {differ}: "
            f"{[ours[key] for key in differ]} and "
            f"{[theirs[key] for key in differ]}."
        )


def _stack(group: list[TableConfig], features: Sequence[Feature]) -> Stack:
    tables = tuple(group)
    offsets, rows = [], 0
    for table in tables:
        offsets.append(rows)
        rows += table.vocabulary_size
    ordered = [f for table in tables for f in features if f.table is table]
    return Stack(tables, tuple(ordered), tuple(offsets))
