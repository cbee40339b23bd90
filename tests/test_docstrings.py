"""Every example in a docstring of the package runs.

```python blocks run in a namespace of their own each, since a reader copies
them alone; `>>>` examples run in their module's, as doctest has it.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tf_distembed as tde

_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    match = "module 'tf_distembed' has no attribute 'TableConfigs'"
    with pytest.raises(AttributeError, match=match):
        tde.TableConfigs  # noqa: B018


def _modules() -> list[ModuleType]:
    names = [
        found.name
        for found in pkgutil.walk_packages(tde.__path__, f"{tde.__name__}.")
    ]
    return [tde, *(importlib.import_module(name) for name in names)]


def _documented(module: ModuleType) -> Iterator[tuple[str, str]]:
    """(name, docstring) of a module and of what is defined in it."""
    yield module.__name__, module.__doc__ or ""
    yield from _members(module, module.__name__, module.__name__)


def _members(owner: Any, path: str, module: str) -> Iterator[tuple[str, str]]:
    for name, member in vars(owner).items():
        if isinstance(member, (classmethod, staticmethod)):
            member = member.__func__
        if isinstance(member, property):
            yield f"{path}.{name}", member.__doc__ or ""
            continue
        member = inspect.unwrap(member) if callable(member) else member
        if not (inspect.isclass(member) or inspect.isfunction(member)):
            continue
        if member.__module__ != module:
            continue
        yield f"{path}.{name}", member.__doc__ or ""
        if inspect.isclass(member):
            yield from _members(member, f"{path}.{name}", module)


MODULES = _modules()
DOCSTRINGS = dict(pair for module in MODULES for pair in _documented(module))
BLOCKS = {
    f"{name}[{number}]": textwrap.dedent(match[2])
    for name, text in DOCSTRINGS.items()
    for number, match in enumerate(_BLOCK.finditer(inspect.cleandoc(text)))
}
DOCTESTS = {
    test.name: test
    for module in MODULES
    for test in doctest.DocTestFinder().find(module)
    if test.examples
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_block_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = compile(BLOCKS[name], f"<docstring of {name}>", "exec")
    exec(code, {"__name__": "docstring"})


@pytest.mark.parametrize("name", DOCTESTS)
def test_the_session_shows_what_happens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=_OPTIONS)
    failed, _ = runner.run(DOCTESTS[name], out=said.append, clear_globs=False)
    assert not failed, "".join(said)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in tde.__all__
        if inspect.isclass(getattr(tde, name))
        or inspect.isfunction(getattr(tde, name))
    ],
)
def test_what_the_package_exports_is_documented(name: str) -> None:
    member = getattr(tde, name)
    path = f"{member.__module__}.{member.__qualname__}"
    text = DOCSTRINGS[path]
    assert len(text.splitlines()) > 1, path
    if name != "load_tables":  # shown with its counterpart
        assert f"{path}[0]" in BLOCKS or path in DOCTESTS, path


def test_every_kind_of_example_is_found() -> None:
    """The lists above are not empty because something is no longer found."""
    assert "tf_distembed[0]" in BLOCKS
    assert "tf_distembed.layer.DistributedEmbedding[0]" in BLOCKS
    assert "tf_distembed.config.FeatureConfig[0]" in BLOCKS
    assert "tf_distembed.testing.emulator.sparsecore_emulator" in DOCTESTS
    text = "".join(
        Path(str(inspect.getsourcefile(module))).read_text(encoding="utf-8")
        for module in MODULES
    )
    assert len(BLOCKS) == len(re.findall(r"^ *```python$", text, re.MULTILINE))
