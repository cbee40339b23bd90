"""Writes the .ipynb of each notebook from its .py, in jupytext's percent form.

    python colabs/write_notebooks.py           # writes what is out of date
    python colabs/write_notebooks.py --check   # only names it

A cell of a .py begins with a line `# %%`, that of a text with
`# %% [markdown]`; `tags=["..."]` may follow. jupytext pairs the two files as
well; this needs nothing but Python, writes no output of a cell, and the same
bytes every time. Two cells are the same in all notebooks:

* tagged "install": that of `install_cell.py`;
* tagged "badge": links to Colab, made when `install_cell.py` names a
  repository, and taken out when it names none.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
NO_NOTEBOOK = {"install_cell.py", "write_notebooks.py"}

HEADER = """\
# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---
"""
_MARK = re.compile(r'# %%( \[markdown\])?(?: tags=\["([\w-]+)"\])?')


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell: its text without the comment marks, and its tag or ""."""

    is_code: bool
    source: str
    tag: str = ""


def cells_of(script: str) -> list[Cell]:
    """The cells of a .py.

    Raises:
        ValueError: it does not begin with the header, or a line that begins a
            cell is malformed.
    """
    if not script.startswith(HEADER):
        raise ValueError("the file does not begin with the header of the pair")
    found = []
    for part in re.split(r"^(?=# %%)", script[len(HEADER) :], flags=re.M)[1:]:
        first, _, body = part.partition("\n")
        match = _MARK.fullmatch(first)
        if match is None:
            raise ValueError(f"this line begins no cell: {first!r}")
        is_code = match[1] is None
        if not is_code:
            body = re.sub(r"^# ?", "", body, flags=re.M)
        found.append(Cell(is_code, body.strip("\n"), match[2] or ""))
    return found


def script_of(cells: list[Cell]) -> str:
    """The .py of some cells."""
    parts = []
    for cell in cells:
        mark = "# %%" if cell.is_code else "# %% [markdown]"
        if cell.tag:
            mark += f' tags=["{cell.tag}"]'
        body = cell.source
        if not cell.is_code:
            lines = body.split("\n")
            body = "\n".join(f"# {line}".rstrip() for line in lines)
        parts.append(f"{mark}\n{body}\n")
    # The formatter wants two blank lines around functions, and allows them
    # elsewhere.
    return HEADER + "\n" + "\n\n".join(parts)


def notebook_of(cells: list[Cell]) -> str:
    """The .ipynb of some cells, none of them run."""
    written: list[dict[str, Any]] = []
    for number, cell in enumerate(cells):
        one: dict[str, Any] = {
            "cell_type": "code" if cell.is_code else "markdown",
            "id": f"cell-{number}",
            "metadata": {"tags": [cell.tag]} if cell.tag else {},
            "source": cell.source.splitlines(keepends=True),
        }
        if cell.is_code:
            one |= {"execution_count": None, "outputs": []}
        written.append(one)
    notebook = {
        "cells": written,
        "metadata": {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def with_shared_cells(name: str, cells: list[Cell], install: str) -> list[Cell]:
    """The cells of the notebook `name` with those that all share.

    Args:
        name: Without an ending.
        cells: Those of its .py.
        install: The text of `install_cell.py`.
    """
    match = re.search(r'^REPOSITORY = "(.*?)"', install, re.M)
    if match is None:
        raise ValueError("install_cell.py does not set REPOSITORY")
    kept = [
        dataclasses.replace(cell, source=install.strip("\n"))
        if cell.tag == "install"
        else cell
        for cell in cells
        if cell.tag != "badge"
    ]
    if match[1]:
        badge = (
            "[![Open in Colab](https://colab.research.google.com/assets/"
            "colab-badge.svg)](https://colab.research.google.com/github/"
            f"{match[1]}/blob/main/colabs/{name}.ipynb)"
        )
        kept.insert(1, Cell(False, badge, "badge"))
    return kept


def wanted(folder: Path = FOLDER) -> dict[Path, str]:
    """Each file of each pair -> the text that it must have."""
    install = (folder / "install_cell.py").read_text(encoding="utf-8")
    texts = {}
    for script in sorted(folder.glob("*.py")):
        if script.name in NO_NOTEBOOK:
            continue
        cells = with_shared_cells(
            script.stem, cells_of(script.read_text(encoding="utf-8")), install
        )
        texts[script] = script_of(cells)
        texts[script.with_suffix(".ipynb")] = notebook_of(cells)
    return texts


def outdated(folder: Path = FOLDER) -> list[Path]:
    """The files that are missing, or differ from `wanted`."""
    return [
        file
        for file, text in wanted(folder).items()
        if not file.is_file() or file.read_text(encoding="utf-8") != text
    ]


def main(arguments: list[str]) -> int:
    """Writes the files, or with --check only names those out of date."""
    files = outdated()
    texts = wanted()
    for file in files:
        print(file)
        if "--check" not in arguments:
            file.write_text(texts[file], encoding="utf-8")
    return 1 if files and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
