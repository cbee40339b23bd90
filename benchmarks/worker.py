"""Runs one group; prints a line of JSON a record."""

from __future__ import annotations

import json
import sys

from benchmarks.groups import FULL, GROUPS, QUICK


def main(name: str, effort: str) -> None:
    group = GROUPS[name]
    for record in group.run(QUICK if effort == "quick" else FULL):
        print(json.dumps({"group": name, **record}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
