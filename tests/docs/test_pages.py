"""What the pages say of the code is there: files, names, the reference."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import tf_distembed as tde

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md")

# Where a path of these pages may begin; the package comes first.
_HOMES = (ROOT / "tf_distembed", ROOT)
_NAMED = re.compile(r"`([\w./]+\.py): ([\w.]+)`")


def _find(path: str) -> Path | None:
    found = [home / path for home in _HOMES if (home / path).exists()]
    return found[0] if found else None


def _names(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """The functions, classes and variables of a file, methods included."""
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            found |= _names(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.Assign):
            found |= {prefix + ast.unparse(one) for one in node.targets}
        if isinstance(node, ast.AnnAssign):
            found.add(prefix + ast.unparse(node.target))
    return found


def _missing(text: str) -> list[str]:
    """What a page names and is not there."""
    # A name may be broken over two lines.
    text = re.sub(r"\s+", " ", text)
    missing = []
    for path, name in _NAMED.findall(text):
        file = _find(path)
        source = "" if file is None else file.read_text(encoding="utf-8")
        if name not in _names(ast.parse(source).body):
            missing.append(f"{path}: {name}")
    for path in re.findall(r"`([\w./]+(?:\.\w+|/))`", text):
        is_file = "/" in path or path.endswith((".py", ".sh"))
        if is_file and _find(path) is None:
            missing.append(path)
    return missing


@pytest.mark.parametrize("page", PAGES)
def test_files_and_names_are_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(_NAMED.findall(re.sub(r"\s+", " ", text))) > 8
    assert _missing(text) == []


def test_what_is_not_there_is_found() -> None:
    assert _missing("`layer.py: DistributedEmbedding.call`") == []
    assert _missing("`config.py: COMBINERS` in `backends/`") == []
    for wrong in (
        "`layer.py: DistributedEmbedding.cal`",
        "`layers.py: DistributedEmbedding`",
    ):
        assert _missing(wrong) == [wrong.strip("`")]
    assert _missing("`backend/` and `steps.py`") == ["backend/"]


def test_the_architecture_names_every_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./]+\.py)[`:]", text))
    package = ROOT / "tf_distembed"
    modules = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if file.name != "__init__.py"
    }
    assert modules - named == set()


def test_the_reference_has_every_public_name() -> None:
    described = {
        name
        for page in (ROOT / "docs" / "api").glob("*.md")
        for name in re.findall(
            r"^::: tf_distembed\.(\S+)$", page.read_text("utf-8"), re.MULTILINE
        )
    }
    public = {
        *tde.__all__,
        *(f"testing.{name}" for name in tde.testing.__all__),
        *(f"datasets.{name}" for name in tde.datasets.__all__),
    }
    assert public <= described
