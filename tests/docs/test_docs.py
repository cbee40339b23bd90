"""Every page: its code runs and prints what it says, its links lead on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest

from tests.docs import blocks

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "colabs" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
NAMES = [file.relative_to(ROOT).as_posix() for file in FILES]

# What a reader's editor highlights and these tests do not run.
_OTHER_LANGUAGES = {"", "text", "console", "bash", "json", "toml", "starlark"}


@pytest.fixture(autouse=True)
def _elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Blocks write files where they run, and may set Keras' policy."""
    monkeypatch.chdir(tmp_path)
    policy = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(policy)


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_the_code_runs_and_prints_what_the_page_says(file: Path) -> None:
    name = file.relative_to(ROOT).as_posix()
    namespace = blocks.new_namespace()
    for block in blocks.python_blocks(file, name):
        if block.not_run is not None:
            continue
        if block.fresh:
            namespace = blocks.new_namespace()
        blocks.run(block, namespace)


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_no_block_escapes_by_the_name_of_its_language(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    languages = {fence.info for fence in blocks.fences(text)}
    assert languages - _OTHER_LANGUAGES <= {"python"}


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_links_to_files_and_headings_lead_somewhere(file: Path) -> None:
    text = _without_blocks(file)
    # Neither of them may be code.
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", re.sub("`.*?`", "", text))
    for link in links:
        path, _, heading = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), link
        if heading:
            assert heading in _headings(target), link


def test_a_page_that_prints_something_else_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    (block,) = blocks.python_blocks(page, "page.md")
    with pytest.raises(AssertionError, match=r"must print\s+2"):
        blocks.run(block, blocks.new_namespace())


def test_a_page_whose_code_raises_fails_at_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```python\na = 1\na.b\n```\n")
    (block,) = blocks.python_blocks(page, "page.md")
    with pytest.raises(AttributeError) as raised:
        blocks.run(block, blocks.new_namespace())
    assert raised.traceback[-1].lineno + 1 == 5


def test_only_a_visible_reason_keeps_a_block_from_being_run(
    tmp_path: Path,
) -> None:
    page = tmp_path / "page.md"
    for line, is_run in [
        ("*Not run by the tests: it needs a Cloud TPU.*", False),
        ("*Not run by the tests: .*", True),
        ("<!-- Not run by the tests: it needs a Cloud TPU. -->", True),
        ("Some text.", True),
    ]:
        page.write_text(f"{line}\n\n```python\npass\n```\n")
        (block,) = blocks.python_blocks(page, "page.md")
        assert (block.not_run is None) == is_run, line


def test_blocks_share_a_namespace_until_a_fresh_one(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na = 1\n```\n```python\nb = a\n```\n"
        f"{blocks.FRESH}\n```python\nc = 1\n```\n"
    )
    found = blocks.python_blocks(page, "page.md")
    assert [block.fresh for block in found] == [False, False, True]


def _without_blocks(file: Path) -> str:
    lines, inside = [], False
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith(("```", "~~~")):
            inside = not inside
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def _headings(file: Path) -> set[str]:
    """What the headings of a file are linked by, as GitHub makes it."""
    titles = re.findall(r"^#+ (.+)$", _without_blocks(file), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in titles
    }
