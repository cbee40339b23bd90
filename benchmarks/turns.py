"""What an environment variable changes: processes that take turns.

Some settings hold for a whole process. Each process here makes the same step
and then waits; one at a time is told to run it, round by round, so that a
ratio still is of two times of the same round.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks import workloads
from benchmarks.comparison import Effort
from benchmarks.timing import Timings

#: name of a setting -> its environment variables; the first is the base.
SETTINGS: dict[str, dict[str, str]] = {
    "as it comes": {},
    "huge pages": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "1 thread within, 1 between": {
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
    },
    "1 thread between operations": {"TF_NUM_INTEROP_THREADS": "1"},
    "4 threads between operations": {"TF_NUM_INTEROP_THREADS": "4"},
    "no oneDNN": {"TF_ENABLE_ONEDNN_OPTS": "0"},
}


class _Process:
    """A process that runs a step when told."""

    def __init__(self, workload: str, variables: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.turns", workload],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, count: int) -> float:
        """Seconds of a step, from `count` of them."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{count}\n")
        stdin.flush()
        for line in stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError("The process ended.")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def settings(effort: Effort) -> Iterator[dict[str, Any]]:
    """The step of A and of B under each of `SETTINGS`."""
    for workload in ("A", "B"):
        processes = {}
        for name, variables in SETTINGS.items():
            processes[name] = _Process(workload, variables)
            # One after the other, also while they start.
            processes[name].run(effort.warm_up)
        seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
        random = np.random.default_rng(0)
        names = list(SETTINGS)
        for _ in range(effort.rounds):
            for index in random.permutation(len(names)):
                name = names[index]
                seconds[name].append(processes[name].run(5))
        for process in processes.values():
            process.end()
        timings = Timings(seconds)
        for name in SETTINGS:
            yield {
                "workload": f"settings, {workload}",
                "mode": "train",
                "optimizer": "adagrad",
                "contender": name,
                **timings.figures(name, names[0]),
            }


def _serve(name: str) -> None:
    from benchmarks.tf_contenders import Ours

    workload = (
        workloads.single_table(10**6)
        if name == "A"
        else workloads.many_tables()
    )
    call = Ours(workload, "adagrad").calls(training=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            call()
        print("seconds", (time.perf_counter() - start) / int(line), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
