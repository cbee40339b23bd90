"""Compares two results of a case and says everything that differs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.conformance.reference import Result

#: Of float32 results: TOLERANCE + TOLERANCE * |expected|.
TOLERANCE = 2e-5


def mismatches(
    got: Result, expected: Result, tolerance: float = TOLERANCE
) -> list[str]:
    """One line for each quantity of a case that differs.

    Args:
        got: may hold other cases too, which are not looked at, and may lack
            gradients (where an update comes with the gradient they cannot be
            seen), but nothing else.
        expected: the reference's result.
        tolerance: absolute, and relative to the expected value.
    """
    lines = []
    for what, wanted, found in _pairs(got, expected):
        if found is None:
            lines.append(f"{what}: missing")
            continue
        if np.shape(found) != np.shape(wanted):
            lines.append(
                f"{what}: shape {np.shape(found)}, expected {np.shape(wanted)}"
            )
            continue
        found, wanted = np.asarray(found), np.asarray(wanted)
        error = np.abs(found - wanted)
        # Not `error > allowed`, which is false for NaN.
        wrong = ~(error <= tolerance + tolerance * np.abs(wanted))
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            lines.append(
                f"{what}: {wrong.sum()} of {wrong.size} wrong, first at {at}: "
                f"got {found[at]!r}, expected {wanted[at]!r}"
            )
    return lines


def _pairs(got: Result, expected: Result) -> Iterator[tuple]:
    """(What it is, expected, got) of every quantity."""
    for step, outputs in enumerate(expected.outputs):
        for name, value in outputs.items():
            yield (
                f"step {step}, output of {name}",
                value,
                got.outputs[step].get(name),
            )
        for name, value in expected.weights_gradients[step].items():
            yield (
                f"step {step}, gradient to the weights of {name}",
                value,
                got.weights_gradients[step].get(name),
            )
        if got.table_gradients:
            for name, value in expected.table_gradients[step].items():
                yield (
                    f"step {step}, gradient to table {name}",
                    value,
                    got.table_gradients[step].get(name),
                )
    for name, value in expected.tables.items():
        yield f"table {name}", value, got.tables.get(name)
    for name, slots in expected.slots.items():
        for slot, value in slots.items():
            yield (
                f"slot {slot} of table {name}",
                value,
                got.slots.get(name, {}).get(slot),
            )
    for name, value in expected.steps.items():
        yield f"step count of table {name}", value, got.steps.get(name)
