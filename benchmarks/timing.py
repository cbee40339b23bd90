"""Interleaved timing: what is compared runs in turn, in one process.

A ratio is the median, over rounds, of the quotient of two times *of the same
round*. A machine that slows down for a while slows both down, so ratios can
be told apart where times cannot.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The median of a quotient over rounds, and its quartiles."""

    median: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """Rounded to what can be trusted of it."""
        return {
            "ratio": round(self.median, 3),
            "low": round(self.low, 3),
            "high": round(self.high, 3),
        }


@dataclasses.dataclass(frozen=True)
class Timings:
    """name -> seconds of one call, one entry a round."""

    seconds: Mapping[str, list[float]]

    def ratio(self, name: str, base: str) -> Ratio:
        """How many times as long as `base` it takes."""
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        quotients = [one / other for one, other in pairs]
        low, median, high = np.quantile(quotients, [0.25, 0.5, 0.75])
        return Ratio(float(median), float(low), float(high))

    def milliseconds(self, name: str) -> float:
        """The median time of one call."""
        return 1e3 * statistics.median(self.seconds[name])

    def figures(self, name: str, base: str, steps: int = 1) -> dict[str, Any]:
        """What a record has of one contender: ratio, time of a step, rounds.

        Args:
            name: Which.
            base: To what the ratio is.
            steps: Steps of one call.
        """
        return {
            **self.ratio(name, base).to_dict(),
            "milliseconds": round(self.milliseconds(name) / steps, 3),
            "rounds": len(self.seconds[name]),
        }


def interleave(
    calls: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    warm_up: int,
    least_seconds: float = 0.1,
    seed: int = 0,
) -> Timings:
    """Times each call once a round, in a new random order every round.

    Args:
        calls: What to time. A call returns when its work is done.
        rounds: How often each is timed.
        warm_up: Calls of each before anything is timed.
        least_seconds: A fast call is repeated within a round for about this
            long, and its time divided by the number of repetitions.
        seed: Of the order.
    """
    repetitions = {}
    for name, call in calls.items():
        for _ in range(warm_up):
            call()
        start = time.perf_counter()
        call()
        once = time.perf_counter() - start
        repetitions[name] = max(1, round(least_seconds / max(once, 1e-6)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    random = np.random.default_rng(seed)
    names = list(calls)
    for _ in range(rounds):
        for index in random.permutation(len(names)):
            name = names[index]
            call, count = calls[name], repetitions[name]
            start = time.perf_counter()
            for _ in range(count):
                call()
            seconds[name].append((time.perf_counter() - start) / count)
    return Timings(seconds)
