"""Row rules in the terms of `TPUEmbeddingV2`'s optimizers.

The formulas agree with the default device's because of four choices: Adam is
given its bias correction as part of the learning rate and no
`sum_inside_sqrt`; Adagrad's accumulator holds Keras' accumulator + epsilon;
FTRL does not multiply its linear slot by the learning rate; and SGD has no
momentum, which a SparseCore cannot do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_distembed import row_rules
from tf_distembed.row_optimizers import RowOptimizer

_native = tf.tpu.experimental.embedding

# Keras' slot names -> TensorFlow's.
NATIVE_SLOTS = {
    "accumulator": "accumulators",
    "linear": "linears",
    "momentum": "momenta",
    "velocity": "velocities",
}


def check_rule(rule: row_rules.RowRule, where: str) -> None:
    """Raises for an optimizer or setting that a SparseCore cannot do."""
    refused = {}
    if isinstance(rule, row_rules.Sgd) and rule.momentum:
        refused = {"momentum": rule.momentum, "nesterov": rule.nesterov}
    elif isinstance(rule, row_rules.Ftrl):
        shrinkage = rule.l2_shrinkage_regularization_strength
        if shrinkage:
            refused = {"l2_shrinkage_regularization_strength": shrinkage}
    if refused:
        raise ValueError(
            f"{where}: placement 'sparsecore' cannot honour {refused} of "
            f"{rule.title}. Use another optimizer, or "
            "placement='default_device'."
        )


def native_optimizer(rule: row_rules.RowRule, clock: RowOptimizer) -> Any:
    """The `tf.tpu.experimental.embedding` optimizer of one stack.

    Args:
        rule: The rule of the stack's tables, past `check_rule`.
        clock: Holds the stack's learning rate and step count.
    """
    rate = _rate(rule, clock)
    if isinstance(rule, row_rules.Sgd):
        return _native.SGD(learning_rate=rate)
    if isinstance(rule, (row_rules.Adagrad, row_rules.TpuAdagrad)):
        first = rule.initial_accumulator_value + added_to_slot(
            rule, "accumulator"
        )
        return _native.Adagrad(
            learning_rate=rate, initial_accumulator_value=first
        )
    if isinstance(rule, row_rules.TpuAdagradMomentum):
        return _native.AdagradMomentum(
            learning_rate=rate,
            momentum=rule.momentum,
            use_nesterov=rule.use_nesterov,
            exponent=rule.exponent,
            beta2=rule.beta2,
            epsilon=rule.epsilon,
        )
    if isinstance(rule, (row_rules.Adam, row_rules.TpuAdam)):
        return _native.Adam(
            learning_rate=rate,
            beta_1=rule.beta_1,
            beta_2=rule.beta_2,
            epsilon=rule.epsilon,
            sum_inside_sqrt=getattr(rule, "sum_inside_sqrt", False),
        )
    if isinstance(rule, (row_rules.Ftrl, row_rules.TpuFtrl)):
        return _native.FTRL(
            learning_rate=rate,
            learning_rate_power=rule.learning_rate_power,
            l1_regularization_strength=rule.l1_regularization_strength,
            l2_regularization_strength=rule.l2_regularization_strength,
            beta=rule.beta,
            initial_accumulator_value=rule.initial_accumulator_value,
            multiply_linear_by_learning_rate=getattr(
                rule, "multiply_linear_by_learning_rate", False
            ),
        )
    raise NotImplementedError(rule.title)


def frozen_optimizer() -> Any:
    """What changes nothing: tables that are looked up and never updated."""
    return _native.SGD(learning_rate=0.0)


def added_to_slot(rule: row_rules.RowRule, slot: str) -> float:
    """What TensorFlow's slot holds beyond Keras' slot of the same meaning."""
    if isinstance(rule, row_rules.Adagrad) and slot == "accumulator":
        return rule.epsilon
    return 0.0


def _rate(
    rule: row_rules.RowRule, clock: RowOptimizer
) -> Callable[[], tf.Tensor]:
    def rate() -> tf.Tensor:
        value, step = clock.rate_and_step(tf.float32)
        if isinstance(rule, row_rules.Adam):
            value *= rule.correction(step, tf.float32)
        return value

    return rate
