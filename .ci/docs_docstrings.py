"""For mkdocs.yml: how the docstrings of the package are read."""

import re
from typing import Any

import griffe

# A doctest: from `>>>` to the blank line after its output.
_DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts a fence around doctests, which Markdown takes for quotes."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called with each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub(
                lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value
            )
