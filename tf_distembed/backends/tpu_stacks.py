"""Stacks of tables on a TPU: each has one rule, learning rate and clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tf_distembed import row_optimizers
from tf_distembed.backends.tpu_optimizers import check_rule
from tf_distembed.config import TableConfig
from tf_distembed.features import Feature
from tf_distembed.row_optimizers import RowOptimizer
from tf_distembed.stacking import Stack, make_stacks


@dataclasses.dataclass
class TpuStack:
    """One stack: its tables and, if it is trained, rule and clock."""

    stack: Stack
    rule: Any
    clock: RowOptimizer | None


def make_tpu_stacks(
    tables: Sequence[TableConfig],
    features: Sequence[Feature],
    optimizers: Mapping[str, Any],
    table_stacking: Any,
) -> list[TpuStack]:
    """The stacks that a TPU's tables form.

    Args:
        tables: In order of configuration.
        features: In flat order.
        optimizers: table name -> optimizer object in use, or None.
        table_stacking: As the layer's.

    Raises:
        ValueError: a table without an own optimizer, or one that the
            hardware cannot do.
    """
    own = {t.name: _own_optimizer(t, optimizers[t.name]) for t in tables}
    keys = {
        table.name: {
            "embedding_dim": table.embedding_dim,
            "optimizer": row_optimizers.stack_key(table, own[table.name]),
        }
        for table in tables
    }
    stacks = make_stacks(tables, features, table_stacking, keys)
    return [_tpu_stack(stack, own) for stack in stacks]


def check_steps(stacks: Sequence[TpuStack], steps: dict[str, int]) -> None:
    """Raises for step counts that tables of one stack cannot all have.

    Args:
        stacks: All stacks.
        steps: table name -> the count it is to get; others keep theirs.
    """
    for one in stacks:
        if one.clock is None:
            continue
        wanted = {
            t.name: int(steps.get(t.name, one.clock.iterations.numpy()))
            for t in one.stack.tables
        }
        if len(set(wanted.values())) > 1:
            raise ValueError(
                "Tables of one stack have one step count on SparseCores, "
                f"and these would have different ones: {wanted}. Keep them "
                "apart with table_stacking, or load all of them from one "
                "state."
            )


def _tpu_stack(stack: Stack, own: dict[str, Any]) -> TpuStack:
    first = stack.tables[0]
    optimizer = own[first.name]
    if optimizer is None:
        return TpuStack(stack, None, None)
    where = f"Table '{first.name}'"
    rule = row_optimizers.rule_of(optimizer, where)
    check_rule(rule, where)
    return TpuStack(
        stack, rule, RowOptimizer(_made_here(optimizer), first.name)
    )


def _own_optimizer(table: TableConfig, optimizer: Any) -> Any:
    if not table.trainable:
        return None
    if optimizer is None:
        raise ValueError(
            f"Table '{table.name}': placement 'sparsecore' needs a table's "
            "own optimizer; the model's cannot train it. Set optimizer= of "
            "the table or of the layer, or placement='default_device'."
        )
    return optimizer


def _made_here(optimizer: Any) -> Any:
    """The optimizer, with its variables on the strategy in scope.

    One made outside the scope has a learning rate that no chip can read; a
    copy made here takes its place, and is the one in `table_optimizers`.
    """
    if row_optimizers.is_native(optimizer):
        return optimizer
    if hasattr(optimizer.iterations.value, "values"):
        return optimizer
    return type(optimizer).from_config(optimizer.get_config())
