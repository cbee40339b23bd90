"""docs/troubleshooting.md has every message that a user can meet, and no more.

Its headings quote the parts of messages that do not vary; `...` stands for
what does. The messages are read from the source of the package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"

# What varies in a message, in the form in which it is read from the source.
HOLE = "\N{REPLACEMENT CHARACTER}"

# Nobody outside the package can bring these about.
_INTERNAL = {
    "rows must hold numbers",  # caught where it is raised, and said better
    f"Function {HOLE} is not known here.",
}


def _text(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, constants) + _text(node.right, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return _text(constants[node.id], {})
    return HOLE


def _messages(source: str) -> Iterator[str]:
    """What is raised, and what run-time checks say."""
    module = ast.parse(source)
    constants = {
        ast.unparse(statement.targets[0]): statement.value
        for statement in module.body
        if isinstance(statement, ast.Assign)
    }
    for node in ast.walk(module):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        if isinstance(node, ast.Raise) or (
            ast.unparse(call.func) == "tf.strings.format"
        ):
            yield _text(call.args[0], constants)


def _is_words(message: str) -> bool:
    """Not only what varies, such as the message of another error."""
    return re.search(r"[A-Za-z]{4}", message.replace(HOLE, "")) is not None


MESSAGES = sorted(
    {
        message
        for file in (ROOT / "tf_distembed").rglob("*.py")
        for message in _messages(file.read_text(encoding="utf-8"))
        if _is_words(message)
    }
    - _INTERNAL
)
PATTERNS = [
    pattern
    for heading in re.findall(
        r"^### (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    for pattern in re.findall(r"`([^`]+)`", heading)
]


def _matches(pattern: str, message: str) -> bool:
    parts = map(re.escape, pattern.split("..."))
    return re.search(".*".join(parts), message, re.DOTALL) is not None


def test_messages_are_found() -> None:
    assert len(MESSAGES) > 100
    assert any("such ids in this batch" in message for message in MESSAGES)


def test_the_page_has_every_message() -> None:
    missing = [
        message
        for message in MESSAGES
        if not any(_matches(pattern, message) for pattern in PATTERNS)
    ]
    assert missing == []


def test_every_heading_is_a_message() -> None:
    stale = [
        pattern
        for pattern in PATTERNS
        if not any(_matches(pattern, message) for message in MESSAGES)
    ]
    assert stale == []


def test_no_heading_stands_twice() -> None:
    assert len(PATTERNS) == len(set(PATTERNS))
