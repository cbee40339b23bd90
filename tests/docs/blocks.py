"""The Python blocks of pages, found and run.

Every block that opens with ```python is run, in the order of its file:

* The blocks of a file share one namespace, so later ones use what earlier
  ones made. After the line `<!-- fresh namespace -->` a new one begins.
* What a block prints is compared with the ```text block that follows it, if
  one does; `...` stands for anything.
* A block is left out only after a line that the reader sees too:
  `*Not run by the tests: REASON.*`
"""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import io
import itertools
import linecache
import re
import sys
import types
from pathlib import Path
from typing import Any

FRESH = "<!-- fresh namespace -->"
NOT_RUN = re.compile(r"\*Not run by the tests: \S.*\.\*")
_FENCE = re.compile(r"^ {0,3}(```+|~~~+)(.*)$")

_CHECKER = doctest.OutputChecker()
_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclasses.dataclass(frozen=True)
class Fence:
    """A fenced block.

    Attributes:
        line: Number of its first line of content, from 1.
        info: What follows the backticks.
        content: Its lines.
        before: The last line before it that is not blank.
        after: Whether it follows the block before it at once.
    """

    line: int
    info: str
    content: str
    before: str
    after: bool


@dataclasses.dataclass(frozen=True)
class Block:
    """A Python block.

    Attributes:
        name: What tracebacks call its file.
        line: Number of its first line, from 1.
        code: Its code.
        fresh: Whether a new namespace begins with it.
        not_run: The visible reason why it is not run, or None.
        output: What it must print, or None.
    """

    name: str
    line: int
    code: str
    fresh: bool
    not_run: str | None
    output: str | None


def fences(text: str) -> list[Fence]:
    """All fenced blocks of a Markdown text.

    Raises:
        ValueError: one is not closed.
    """
    found: list[Fence] = []
    mark, start, info, before, last = "", 0, "", "", ""
    content: list[str] = []
    at_once = False
    for number, line in enumerate(text.splitlines(), 1):
        match = _FENCE.match(line)
        if mark:
            if match and match[1].startswith(mark) and not match[2].strip():
                found.append(
                    Fence(start, info, "\n".join(content), before, at_once)
                )
                mark, last, at_once = "", line, True
            else:
                content.append(line)
        elif match:
            mark, info = match[1], match[2].strip()
            start, before, content = number + 1, last, []
        elif line.strip():
            last, at_once = line.strip(), False
    if mark:
        raise ValueError(f"The block that begins in line {start} has no end.")
    return found


def python_blocks(path: Path, name: str) -> list[Block]:
    """The Python blocks of a file, in order."""
    found = []
    all_fences = fences(path.read_text(encoding="utf-8"))
    for fence, following in itertools.zip_longest(all_fences, all_fences[1:]):
        if fence.info != "python":
            continue
        output = None
        if following is not None and following.info == "text":
            output = following.content if following.after else None
        match = NOT_RUN.fullmatch(fence.before)
        found.append(
            Block(
                name=f"<{name}, line {fence.line}>",
                line=fence.line,
                code=fence.content,
                fresh=fence.before == FRESH,
                not_run=match[0] if match else None,
                output=output,
            )
        )
    return found


def new_namespace() -> dict[str, Any]:
    """What a file begins with: that of a module, as AutoGraph wants it."""
    module = types.ModuleType("documentation")
    sys.modules[module.__name__] = module
    return vars(module)


def run(block: Block, namespace: dict[str, Any]) -> str:
    """Runs one block and returns what it printed.

    Line numbers in tracebacks are those of the file.

    Raises:
        AssertionError: it printed something else than the file says.
    """
    source = "\n" * (block.line - 1) + block.code + "\n"
    # AutoGraph reads the source of the functions that it converts.
    linecache.cache[block.name] = (
        len(source),
        None,
        source.splitlines(keepends=True),
        block.name,
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, block.name, "exec"), namespace)
    got = printed.getvalue()
    if block.output is not None:
        want = block.output + "\n"
        if not _CHECKER.check_output(want, got, _OPTIONS):
            raise AssertionError(
                f"{block.name} must print\n{want}\nbut printed\n{got}"
            )
    return got
