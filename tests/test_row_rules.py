"""The formulas of the row optimizers, apart from any table.

Keras' own are compared with Keras' optimizers, those of
`tf.tpu.experimental.embedding` with what TensorFlow lowers for SparseCore,
and all of them, in several steps, with the conformance reference.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conformance.reference import Reference
from tf_distembed import row_rules

ROWS, DIM, STEPS = 5, 3, 4
#: How TensorFlow steps on a SparseCore; the file says how it was taken.
LOWERED = json.loads(
    (
        pathlib.Path(__file__).parent
        / "testing/data/sparsecore_optimizer_steps.json"
    ).read_text()
)["cases"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A rule, and the method of the conformance reference that states it."""

    rule: row_rules.RowRule
    formula: str
    settings: tuple[str, ...] = ()
    keras: Any = None

    def arguments(self) -> dict[str, Any]:
        return {name: getattr(self.rule, name) for name in self.settings}


_ADAM = ("beta_1", "beta_2", "epsilon")
_FTRL = (
    "learning_rate_power",
    "l1_regularization_strength",
    "l2_regularization_strength",
    "beta",
)
_KERAS_FTRL = (*_FTRL, "l2_shrinkage_regularization_strength")
_MOMENTUM = ("momentum", "use_nesterov", "exponent", "beta2", "epsilon")
K = keras.optimizers

CASES = {
    "sgd": Case(row_rules.Sgd(), "sgd", (), K.SGD),
    "momentum": Case(
        row_rules.Sgd(0.9), "momentum", ("momentum", "nesterov"), K.SGD
    ),
    "nesterov": Case(
        row_rules.Sgd(0.8, True), "momentum", ("momentum", "nesterov"), K.SGD
    ),
    "adagrad": Case(row_rules.Adagrad(), "adagrad", ("epsilon",), K.Adagrad),
    "adagrad_settings": Case(
        row_rules.Adagrad(0.5, 1e-2), "adagrad", ("epsilon",), K.Adagrad
    ),
    "adam": Case(row_rules.Adam(), "adam", _ADAM, K.Adam),
    "adam_settings": Case(
        row_rules.Adam(0.7, 0.9, 1e-2), "adam", _ADAM, K.Adam
    ),
    "ftrl": Case(row_rules.Ftrl(), "ftrl", _KERAS_FTRL, K.Ftrl),
    "ftrl_settings": Case(
        row_rules.Ftrl(-0.4, 0.2, 0.05, 0.02, 0.03, 0.3),
        "ftrl",
        _KERAS_FTRL,
        K.Ftrl,
    ),
    "tpu_adagrad": Case(row_rules.TpuAdagrad(0.2), "native_adagrad"),
    "tpu_adagrad_momentum": Case(
        row_rules.TpuAdagradMomentum(0.8, True, 3.0, 0.9, 1e-3),
        "native_adagrad_momentum",
        _MOMENTUM,
    ),
    "tpu_adagrad_momentum_sum": Case(
        row_rules.TpuAdagradMomentum(0.8, False, 2.0, 1.0, 1e-3),
        "native_adagrad_momentum",
        _MOMENTUM,
    ),
    "tpu_adam": Case(
        row_rules.TpuAdam(0.8, 0.9, 1e-2, True),
        "native_adam",
        (*_ADAM, "sum_inside_sqrt"),
    ),
    "tpu_adam_sum_outside": Case(
        row_rules.TpuAdam(0.8, 0.9, 1e-2, False),
        "native_adam",
        (*_ADAM, "sum_inside_sqrt"),
    ),
    "tpu_ftrl": Case(
        row_rules.TpuFtrl(-0.5, 0.1, 0.05, 0.02, 0.3, False),
        "native_ftrl",
        (*_FTRL, "multiply_linear_by_learning_rate"),
    ),
    "tpu_ftrl_multiplied": Case(
        row_rules.TpuFtrl(-0.4, 0.1, 0.05, 0.02, 0.3, True),
        "native_ftrl",
        (*_FTRL, "multiply_linear_by_learning_rate"),
    ),
}


def _draw(seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return draw.normal(size=(ROWS, DIM)).astype(np.float32)


def _first_slots(rule: row_rules.RowRule) -> dict[str, np.ndarray]:
    return {
        name: np.full((ROWS, DIM), value, np.float32)
        for name, value in rule.slots.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_a_rule_equals_the_reference(name: str) -> None:
    case, rate = CASES[name], 0.3
    formula = getattr(Reference({}), case.formula)
    rows, slots = tf.constant(_draw(0)), _first_slots(case.rule)
    expected, expected_slots = _draw(0).astype(np.float64), dict(slots)
    for t in range(1, STEPS + 1):
        gradient = _draw(t)
        rows, slots = case.rule.update(
            rows,
            tf.constant(gradient),
            slots,
            tf.constant(t, tf.int64),
            tf.constant(rate),
        )
        expected, expected_slots = formula(
            expected,
            expected_slots,
            gradient.astype(np.float64),
            t,
            rate,
            **case.arguments(),
        )
        np.testing.assert_allclose(rows, expected, rtol=2e-5, atol=1e-5)
        assert set(slots) == set(expected_slots) == set(case.rule.slots)
        for slot, value in expected_slots.items():
            np.testing.assert_allclose(slots[slot], value, 2e-5, 2e-6)


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].keras])
def test_a_rule_equals_keras(name: str) -> None:
    case = CASES[name]
    optimizer = case.keras(0.3, **dataclasses.asdict(case.rule))
    variable = keras.Variable(_draw(0), name="t")
    rows, slots = tf.constant(_draw(0)), _first_slots(case.rule)
    for t in range(1, STEPS + 1):
        gradient = tf.constant(_draw(t))
        optimizer.apply([gradient], [variable])
        rows, slots = case.rule.update(
            rows, gradient, slots, tf.constant(t, tf.int64), tf.constant(0.3)
        )
        np.testing.assert_allclose(rows, variable, rtol=1e-5, atol=1e-6)
    kept = {
        part.name.removeprefix("t_"): part
        for part in optimizer.variables
        if tuple(part.shape) == (ROWS, DIM)
    }
    assert set(kept) == set(slots)
    for slot, value in kept.items():
        np.testing.assert_allclose(slots[slot], value, 1e-5, 1e-6)


#: Optimizer in the file -> its rule, the slots in the file's order, and the
#: rule's name for a setting where it is another.
LOWERINGS: dict[str, tuple[type, tuple[str, ...], dict[str, str]]] = {
    "Sgd": (row_rules.Sgd, (), {}),
    "Adagrad": (row_rules.TpuAdagrad, ("accumulator",), {}),
    "AdagradMomentum": (
        row_rules.TpuAdagradMomentum,
        ("accumulator", "momentum"),
        {"beta1": "momentum"},
    ),
    "Adam": (
        row_rules.TpuAdam,
        ("momentum", "velocity"),
        {
            "beta1": "beta_1",
            "beta2": "beta_2",
            "use_sum_inside_sqrt": "sum_inside_sqrt",
        },
    ),
    "Ftrl": (row_rules.TpuFtrl, ("accumulator", "linear"), {}),
}


@pytest.mark.parametrize(
    "lowered",
    LOWERED,
    ids=[f"{n}-{case['optimizer']}" for n, case in enumerate(LOWERED)],
)
def test_a_rule_equals_the_lowering_for_sparsecore(
    lowered: dict[str, Any],
) -> None:
    kind, names, spelled = LOWERINGS[lowered["optimizer"]]
    settings = {spelled.get(k, k): v for k, v in lowered["settings"].items()}
    gradient, rows, *slots, rate = (
        tf.constant(value, tf.float32) for value in lowered["args"]
    )
    new, new_slots = kind(**settings).update(
        rows,
        gradient,
        dict(zip(names, slots, strict=True)),
        tf.constant(3, tf.int64),
        rate[0],
    )
    got = [new, *(new_slots[slot] for slot in names)]
    for value, expected in zip(got, lowered["out"], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_a_rule_keeps_the_dtype_of_its_rows(name: str, dtype: str) -> None:
    rule = CASES[name].rule

    def step(dtype: str) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        cast = {k: tf.cast(v, dtype) for k, v in _first_slots(rule).items()}
        return rule.update(
            tf.cast(_draw(0), dtype),
            tf.cast(_draw(1), dtype),
            cast,
            tf.constant(1, tf.int64),
            tf.constant(0.25, dtype),
        )

    rows, slots = step(dtype)
    expected, expected_slots = step("float32")
    assert rows.dtype == dtype
    tolerance = {"bfloat16": 0.05, "float16": 0.01, "float64": 1e-5}[dtype]
    for slot, value in expected_slots.items():
        assert slots[slot].dtype == dtype
        got = tf.cast(slots[slot], tf.float32)
        np.testing.assert_allclose(got, value, tolerance, tolerance)
    got = tf.cast(rows, tf.float32)
    np.testing.assert_allclose(got, expected, tolerance, tolerance)


@pytest.mark.parametrize("name", CASES)
def test_gradient_zero_gives_no_nan(name: str) -> None:
    """A row may be touched with weight 0, in its very first step."""
    rule = CASES[name].rule
    rules = [rule]
    if "accumulator" in rule.slots and hasattr(
        rule, "initial_accumulator_value"
    ):
        rules.append(dataclasses.replace(rule, initial_accumulator_value=0.0))
    for one in rules:
        rows, slots = one.update(
            tf.constant(_draw(0)),
            tf.zeros([ROWS, DIM]),
            {k: tf.constant(v) for k, v in _first_slots(one).items()},
            tf.constant(1, tf.int64),
            tf.constant(0.3),
        )
        assert np.all(np.isfinite(rows))
        assert all(np.all(np.isfinite(slot)) for slot in slots.values())


def test_rules_are_equal_if_their_settings_are() -> None:
    assert row_rules.Adam() == row_rules.Adam()
    assert row_rules.Adam() != row_rules.Adam(beta_1=0.5)
    assert row_rules.Adagrad() != row_rules.TpuAdagrad()
    assert hash(row_rules.Ftrl()) == hash(row_rules.Ftrl())
