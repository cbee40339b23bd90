"""What an export holds: its signature, its tables, its size."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class ServedTensor:
    """An input or output of a signature.

    Attributes:
        name: Its name in the signature.
        dtype: Name of its dtype.
        shape: Sizes, None where they vary; None if even the rank does.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None


@dataclasses.dataclass(frozen=True)
class ExportedTable:
    """A table in an export.

    Attributes:
        layer: Name of its layer.
        table: Its own name; `"embeddings"` in an `EmbedReduce`.
        rows: Number of rows.
        dim: Their width.
        dtype: In which they are stored.
        bytes: How many they take.
    """

    layer: str
    table: str
    rows: int
    dim: int
    dtype: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What `export_for_serving` wrote.

    Attributes:
        directory: Where the SavedModel is.
        signature: The name of its signature.
        inputs: The signature's inputs.
        outputs: Its outputs.
        tables: The embedding tables in it.
        other_bytes: Bytes of all other weights.
        disk_bytes: Bytes of all files.
    """

    directory: str
    signature: str
    inputs: tuple[ServedTensor, ...]
    outputs: tuple[ServedTensor, ...]
    tables: tuple[ExportedTable, ...]
    other_bytes: int
    disk_bytes: int

    def __str__(self) -> str:
        lines = [
            f"SavedModel in {self.directory} ({_size(self.disk_bytes)}), "
            f"signature '{self.signature}'"
        ]
        rows: list[tuple[str, str, str, str]] = []
        for what, tensors in (("input", self.inputs), ("output", self.outputs)):
            for one in tensors:
                shape = "[...]" if one.shape is None else str(list(one.shape))
                rows.append((what, one.name, one.dtype, shape))
        for table in self.tables:
            shape = f"{table.rows:,} x {table.dim:,}, {_size(table.bytes)}"
            name = f"{table.layer}/{table.table}"
            rows.append(("table", name, table.dtype, shape))
        rows.append(("other weights", "", "", _size(self.other_bytes)))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        for row in rows:
            cells = [c.ljust(w) for c, w in zip(row[:3], widths, strict=True)]
            lines.append("  ".join(["", *cells, row[3]]).rstrip())
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as JSON.

        Args:
            path: A file to write it to as well, or None.
        """
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """A bar a table, as long as the bytes it takes in memory.

        Args:
            path: A file to draw it into as well, or None.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            matplotlib = importlib.import_module("matplotlib.figure")
        except ImportError as error:
            raise ImportError(
                "ExportReport.plot needs matplotlib: pip install matplotlib. "
                "str(report) and report.to_dict() need nothing."
            ) from error
        bars = [(f"{t.layer}/{t.table}", t.bytes) for t in self.tables]
        bars.append(("other weights", self.other_bytes))
        figure = matplotlib.Figure(
            figsize=(8, 1 + 0.4 * len(bars)), layout="constrained"
        )
        axes = figure.add_subplot()
        drawn = axes.barh(
            [name for name, _ in bars], [size / 2**20 for _, size in bars]
        )
        axes.bar_label(drawn, [_size(size) for _, size in bars], padding=4)
        axes.margins(x=0.2)  # room for the labels
        axes.invert_yaxis()
        axes.set_xlabel("MiB in memory")
        axes.set_title(f"SavedModel in {self.directory}")
        if path is not None:
            figure.savefig(path)
        return figure


def _size(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024  # type: ignore[assignment]
    return f"{count:,} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
