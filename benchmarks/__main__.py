"""Measures this package against others, and itself.

    bash benchmarks/setup.sh                once: the environments, the C floor
    python -m benchmarks --quick            the main figures, some minutes
    python -m benchmarks                    all of it; 20 GiB of memory
    python -m benchmarks --only tf-A-1e6    some groups
    python -m benchmarks --json F --plot D  also to a file, and as plots; a
                                            file there keeps other groups

Each group runs in a process of its own, in which ours and the others take
turns; a ratio is another's time over ours. The last line is JSON. TPUs are
not in it: the emulator computes what a TPU does, not as fast.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import report
from benchmarks.groups import GROUPS, ROOT


def run_group(name: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    """The records of one group, as they come.

    Raises:
        FileNotFoundError: its environment has not been made.
        subprocess.CalledProcessError: it failed, after those records.
    """
    group = GROUPS[name]
    if not group.python.exists():
        raise FileNotFoundError(
            f"{group.python} does not exist. Run: bash benchmarks/setup.sh"
        )
    command = [str(group.python), "-m", "benchmarks.worker", name]
    with subprocess.Popen(
        [*command, "quick" if quick else "full"],
        cwd=ROOT,
        env={**os.environ, **group.all_variables},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=[])
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--plot", type=pathlib.Path, metavar="DIRECTORY")
    options = parser.parse_args()
    names = options.only or [
        name
        for name, group in GROUPS.items()
        if group.quick or not options.quick
    ]
    records: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for name in names:
        print(f"-- {name}", file=sys.stderr, flush=True)
        found = []
        try:
            for record in run_group(name, quick=options.quick):
                found.append(record)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"-- {name} FAILED: {error}", file=sys.stderr, flush=True)
            failed[name] = str(error)
        for line in report.lines(found):
            print(line, flush=True)
        records += found
    if options.json and options.json.exists():
        # Those of groups that were not run this time stay.
        earlier = json.loads(options.json.read_text())["records"]
        records += [r for r in earlier if r["group"] not in names]
    figures = report.figures(records)
    print()
    for line in report.target_lines(figures):
        print(line)
    result = {"targets": figures, "failed": failed}
    if options.json:
        whole = {**result, "records": records}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    if options.plot:
        source = options.json or _written(records, options.plot)
        python = GROUPS["tf-A-1e6"].python
        subprocess.run(
            [python, "-m", "benchmarks.plots", source, options.plot],
            cwd=ROOT,
            check=True,
        )
    print(json.dumps(result))
    if failed:
        sys.exit(1)


def _written(
    records: list[dict[str, Any]], directory: pathlib.Path
) -> pathlib.Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "results.json"
    path.write_text(json.dumps({"records": records}, indent=1) + "\n")
    return path


if __name__ == "__main__":
    main()
