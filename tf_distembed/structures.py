"""Nested structures of features: dicts, lists, tuples and namedtuples.

Written for this layer because outputs come back in the order of
`feature_configs`, a leaf of the inputs may itself be a list of ids, and paths
must be tuples that are never joined into strings.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Path = tuple[Any, ...]


def flatten(structure: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """(path, leaf) of every leaf, in the order of the structure itself."""
    if isinstance(structure, Mapping):
        children = [((*path, key), structure[key]) for key in structure]
    elif isinstance(structure, (list, tuple)):
        children = [((*path, i), item) for i, item in enumerate(structure)]
    else:
        return [(path, structure)]
    return [leaf for at, child in children for leaf in flatten(child, at)]


def flatten_up_to(
    structure: Any, value: Any, what: str, path: Path = ()
) -> list[Any]:
    """The parts of `value` that stand where `structure` has its leaves.

    Lists, tuples and namedtuples of one length stand for each other, and so
    do mappings of the same keys.

    Raises:
        ValueError: `value` has another structure; says where and how.
    """
    if isinstance(structure, Mapping):
        if not isinstance(value, Mapping):
            _raise(what, path, f"a dict with the keys {list(structure)}", value)
        missing = [key for key in structure if key not in value]
        extra = [key for key in value if key not in structure]
        if missing or extra:
            raise ValueError(
                f"The {what}{_at(path)} must have the keys {list(structure)}, "
                f"as feature_configs has. Missing: {missing}. Unexpected: "
                f"{extra}."
            )
        children = [(key, structure[key], value[key]) for key in structure]
    elif isinstance(structure, (list, tuple)):
        count = len(structure)
        if not isinstance(value, (list, tuple)) or len(value) != count:
            _raise(what, path, f"a list or tuple of {count} entries", value)
        children = list(zip(range(count), structure, value, strict=True))
    else:
        return [value]
    return [
        leaf
        for key, part, inner in children
        for leaf in flatten_up_to(part, inner, what, (*path, key))
    ]


def pack(structure: Any, leaves: Sequence[Any]) -> Any:
    """`structure` with its leaves replaced, in flat order."""
    remaining = list(leaves)[::-1]
    return map_leaves(structure, lambda _: remaining.pop())


def map_leaves(structure: Any, function: Callable[[Any], Any]) -> Any:
    """`structure` with `function` applied to each leaf, in flat order."""
    if isinstance(structure, Mapping):
        items = [
            (key, map_leaves(structure[key], function)) for key in structure
        ]
        if isinstance(structure, collections.OrderedDict):
            return collections.OrderedDict(items)
        return dict(items)
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(map_leaves(i, function) for i in structure))
    if isinstance(structure, (list, tuple)):
        parts = [map_leaves(item, function) for item in structure]
        return parts if isinstance(structure, list) else tuple(parts)
    return function(structure)


def encode(structure: Any) -> Any:
    """A form of the structure that survives JSON: order, tuples, names."""
    if isinstance(structure, Mapping):
        kind = (
            "ordered_dict"
            if isinstance(structure, collections.OrderedDict)
            else "dict"
        )
        items = [[key, encode(structure[key])] for key in structure]
        return {"kind": kind, "items": items}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return {
            "kind": "namedtuple",
            "name": type(structure).__name__,
            "fields": list(structure._fields),
            "items": [encode(item) for item in structure],
        }
    if isinstance(structure, (list, tuple)):
        kind = "list" if isinstance(structure, list) else "tuple"
        return {"kind": kind, "items": [encode(item) for item in structure]}
    return {"kind": "leaf", "value": structure}


def decode(config: Mapping[str, Any]) -> Any:
    """The structure that `encode` was given.

    A namedtuple comes back as one of the same name and fields.
    """
    kind = config["kind"]
    if kind == "leaf":
        return config["value"]
    if kind in ("dict", "ordered_dict"):
        items = [(key, decode(item)) for key, item in config["items"]]
        if kind == "ordered_dict":
            return collections.OrderedDict(items)
        return dict(items)
    parts = [decode(item) for item in config["items"]]
    if kind == "list":
        return parts
    if kind == "namedtuple":
        return collections.namedtuple(config["name"], config["fields"])(*parts)
    return tuple(parts)


def _at(path: Path) -> str:
    return f" at {path}" if path else ""


def _raise(what: str, path: Path, expected: str, value: Any) -> None:
    length = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
    raise ValueError(
        f"The {what}{_at(path)} must be {expected}, as in feature_configs. "
        f"Received: a {type(value).__name__}{length}"
    )
