"""The files of colabs/ fit together; .ci/notebooks.sh runs the notebooks."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "colabs"
NOTEBOOKS = [
    "custom_training_loop",
    "migrating_from_keras_rs",
    "quickstart_movielens",
    "tpu_sparsecore",
]


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


writer = _load("write_notebooks")
# It does nothing here, where the package can be imported.
install_cell = _load("install_cell")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "colabs"))


def test_each_notebook_is_a_pair_of_the_same_cells() -> None:
    assert sorted(f.stem for f in FOLDER.glob("*.ipynb")) == NOTEBOOKS
    assert [f.name for f in writer.outdated()] == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_ipynb_has_the_cells_of_the_py_and_no_output(name: str) -> None:
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))
    script = (FOLDER / f"{name}.py").read_text("utf-8")
    for cell in notebook["cells"]:
        lines = "".join(cell["source"]).split("\n")
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
        else:
            lines = [f"# {line}".rstrip() for line in lines]
        assert "\n".join(lines) in script
    assert len(notebook["cells"]) == script.count("\n# %%")


def test_a_change_of_one_half_is_seen(copy: Path) -> None:
    script = copy / "tpu_sparsecore.py"
    text = script.read_text("utf-8")
    script.write_text(text.replace("DIM = 500, 200, 8", "DIM = 500, 200, 4"))
    assert [f.name for f in writer.outdated(copy)] == ["tpu_sparsecore.ipynb"]
    script.write_text(text)
    (copy / "tpu_sparsecore.ipynb").unlink()
    assert [f.name for f in writer.outdated(copy)] == ["tpu_sparsecore.ipynb"]


def test_every_notebook_installs_first_and_says_its_device() -> None:
    install = (FOLDER / "install_cell.py").read_text("utf-8").strip()
    for name in NOTEBOOKS:
        cells = writer.cells_of((FOLDER / f"{name}.py").read_text("utf-8"))
        first = next(cell for cell in cells if cell.is_code)
        assert first.tag == "install", name
        assert first.source == install, name
        calls = [
            ast.unparse(node.func)
            for cell in cells
            if cell.is_code
            for node in ast.walk(ast.parse(cell.source))
            if isinstance(node, ast.Call)
        ]
        # It prints what it found.
        assert "tde.make_strategy" in calls, name


def test_a_badge_appears_once_a_repository_is_named(copy: Path) -> None:
    install = copy / "install_cell.py"
    text = install.read_text("utf-8")
    # Named, and taken away again.
    for repository in ("some/one", "", "some/one"):
        install.write_text(
            re.sub('REPOSITORY = ".*?"', f'REPOSITORY = "{repository}"', text)
        )
        for file, wanted in writer.wanted(copy).items():
            link = f"{repository}/blob/main/colabs/{file.stem}.ipynb)"
            assert wanted.count("colab-badge") == bool(repository)
            assert wanted.count(link) == bool(repository)
            file.write_text(wanted, encoding="utf-8")
        assert writer.outdated(copy) == []


@pytest.mark.parametrize(
    "installed,has_tpu,has_gpu,expected",
    [
        ({}, False, False, ([], "[cpu]")),
        ({}, False, True, ([], "[gpu]")),
        ({}, True, False, ([], "[tpu]")),
        # What fits stays, and nothing is put beside it.
        ({"tensorflow": "2.21.0"}, False, True, ([], "")),
        ({"tensorflow-cpu": "2.20.1"}, False, False, ([], "")),
        ({"tensorflow-tpu": "2.20.0"}, True, False, ([], "")),
        # What does not goes first.
        ({"tensorflow": "2.21.0"}, True, False, (["tensorflow"], "[tpu]")),
        ({"tensorflow": "2.19.0"}, False, True, (["tensorflow"], "[gpu]")),
        (
            {"tensorflow-tpu": "2.20.0"},
            False,
            False,
            (["tensorflow-tpu"], "[cpu]"),
        ),
        (
            {"tensorflow": "2.21.0", "tensorflow-cpu": "2.21.0"},
            False,
            False,
            (["tensorflow", "tensorflow-cpu"], "[cpu]"),
        ),
        (
            {"tf-nightly": "2.22.0.dev1"},
            False,
            False,
            (["tf-nightly"], "[cpu]"),
        ),
        # Not the module.
        ({"tensorflow-datasets": "4.9"}, False, False, ([], "[cpu]")),
    ],
)
def test_the_install_cell_leaves_one_tensorflow(
    installed: dict[str, str],
    has_tpu: bool,
    has_gpu: bool,
    expected: tuple[list[str], str],
) -> None:
    plan = install_cell.tensorflow_plan(installed, has_tpu, has_gpu)
    assert plan == expected
