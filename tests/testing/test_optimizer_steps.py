"""The emulated optimizer steps equal TensorFlow's own lowering to a TPU.

The values come from the program that TensorFlow makes for a TPU; the data
file says how they were taken.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tf_distembed.testing import optimizer_steps

DATA = json.loads(
    (
        pathlib.Path(__file__).parent / "data/sparsecore_optimizer_steps.json"
    ).read_text()
)


def name_of(case: dict) -> str:
    chosen = [key for key, value in case["settings"].items() if value is True]
    return "-".join([case["optimizer"], *chosen])


@pytest.mark.parametrize("case", DATA["cases"], ids=name_of)
def test_step_equals_tensorflows_lowering(case: dict) -> None:
    step = optimizer_steps.STEPS[case["optimizer"]]
    gradient, *state, learning_rate = (
        tf.constant(array, tf.float32) for array in case["args"]
    )
    got = step.function(gradient, state, learning_rate, **case["settings"])
    assert set(case["settings"]) == set(step.settings)
    assert len(state) == 1 + len(step.slots)
    for value, expected in zip(got, case["out"], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
