"""Where each row of a table lies on the SparseCores.

With `S` SparseCores in all, a row goes to shard `(id + rotation) mod S`, at
`id div S + offset` within it. A shard belongs to one SparseCore; a chip's
variable holds the shards of its SparseCores one after other. Tables of a
stack follow each other within every shard, and each next one is rotated by a
chip, so that the first rows of all tables, often the hottest, are spread.

Two chips with two SparseCores each, a table of 10 rows, rotation 0:

```
shard 0   rows 0 4 8      chip 0
shard 1   rows 1 5 9      chip 0
shard 2   rows 2 6 -      chip 1
shard 3   rows 3 7 -      chip 1
```

(The real height of a table is padded to a multiple of 8 in each shard.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tf_distembed.backends.private_tensorflow import SparseCoreTableLayout
from tf_distembed.config import TableConfig

# Heights per shard and widths are multiples of this many float32 values.
ALIGNMENT = 8
MAX_STACK_ROWS = 2**31


@dataclasses.dataclass(frozen=True)
class Topology:
    """The SparseCores of a strategy.

    Raises:
        ValueError: the number of SparseCores is no power of two.
    """

    num_chips: int
    sparsecores_per_chip: int

    def __post_init__(self) -> None:
        if self.num_shards & (self.num_shards - 1):
            raise ValueError(
                f"Placement 'sparsecore' needs a power of two of SparseCores. "
                f"Received: {self.num_chips} chips with "
                f"{self.sparsecores_per_chip} each, {self.num_shards} in all."
            )

    @property
    def num_shards(self) -> int:
        """SparseCores of all chips."""
        return self.num_chips * self.sparsecores_per_chip


@dataclasses.dataclass(frozen=True)
class TableLayout:
    """Where the rows of one table lie.

    Attributes:
        table: The table.
        internal_name: What TensorFlow knows it as.
        stack_name: What TensorFlow knows its stack as.
        topology: The SparseCores.
        padded_rows: Rows of the table with padding, over all shards.
        padded_dim: Width with padding.
        offset: First row of the table within each shard.
        rotation: By how many shards it is turned.
        shard_rows: Rows of the whole stack in each shard.
    """

    table: TableConfig
    internal_name: str
    stack_name: str
    topology: Topology
    padded_rows: int
    padded_dim: int
    offset: int
    rotation: int
    shard_rows: int

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(chip, position in the chip's variable) of each row."""
        shards = self.topology.num_shards
        per_chip = self.topology.sparsecores_per_chip
        shard = (ids + self.rotation) % shards
        row = ids // shards + self.offset
        return shard // per_chip, shard % per_chip * self.shard_rows + row

    def to_proto(self) -> SparseCoreTableLayout:
        """The form that TensorFlow takes."""
        table = self.table
        return SparseCoreTableLayout(
            table_name=self.internal_name,
            stacked_table_name=self.stack_name,
            num_sparse_cores=self.topology.num_shards,
            num_partitions=self.topology.num_chips,
            total_rows_per_sparse_core_shard=self.shard_rows,
            unsharded_shape=[table.vocabulary_size, table.embedding_dim],
            unsharded_padded_shape=[self.padded_rows, self.padded_dim],
            sparse_core_shard_row_offset=self.offset,
            sparse_core_shard_rotation=self.rotation,
        )


def lay_out(
    stacks: Sequence[Sequence[TableConfig]], topology: Topology
) -> dict[str, TableLayout]:
    """Table name -> its layout, for tables grouped into stacks.

    TensorFlow's own names are numbers of fixed width: it joins and sorts
    names, and user names could collide then.

    Raises:
        ValueError: a stack has 2**31 rows or more.
    """
    layouts: dict[str, TableLayout] = {}
    for stack_number, stack in enumerate(stacks):
        unit = ALIGNMENT * topology.num_shards
        padded = [_round_up(table.vocabulary_size, unit) for table in stack]
        if sum(padded) >= MAX_STACK_ROWS:
            raise ValueError(
                f"The stack of tables {[table.name for table in stack]} has "
                f"{sum(padded):,} rows with padding; placement 'sparsecore' "
                f"takes fewer than {MAX_STACK_ROWS:,}. Use table_stacking to "
                "keep these tables apart, or smaller tables."
            )
        offset = 0
        for number, (table, rows) in enumerate(zip(stack, padded, strict=True)):
            layouts[table.name] = TableLayout(
                table=table,
                internal_name=f"table{len(layouts):06d}",
                stack_name=f"stack{stack_number:06d}",
                topology=topology,
                padded_rows=rows,
                padded_dim=_round_up(table.embedding_dim, ALIGNMENT),
                offset=offset,
                rotation=number
                * topology.sparsecores_per_chip
                % topology.num_shards,
                shard_rows=sum(padded) // topology.num_shards,
            )
            offset += rows // topology.num_shards
    return layouts


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
