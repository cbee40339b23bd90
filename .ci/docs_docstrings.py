"""For mkdocs.yml: how the docstrings of the package are read."""

import re
import textwrap
from typing import Any

import griffe

# A doctest: from `>>>` to the blank line after its output.
_DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
# What a layer is called with, as an `Args` section is indented.
_CALL = re.compile(r"^Call arguments:\n((?:(?: {4}.*)?\n)+)", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+): ", re.MULTILINE)


def _list_of_arguments(section: re.Match[str]) -> str:
    items = _ARGUMENT.sub(r"* `\1`: ", textwrap.dedent(section[1]))
    return f"**Call arguments:**\n\n{items}"


def _as_markdown(docstring: str) -> str:
    docstring = _DOCTEST.sub(
        lambda match: f"```pycon\n{match[0]}\n```", docstring
    )
    docstring = _CALL.sub(_list_of_arguments, docstring)
    return re.sub("^Call output:", "**Call output:**", docstring, flags=re.M)


class Markdown(griffe.Extension):
    """Makes Markdown of what Griffe would not know.

    Doctests get a fence, as Markdown takes them for quotes. Sections that only
    layers have become lists.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called with each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = _as_markdown(obj.docstring.value)
